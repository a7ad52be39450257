"""Controller library of the deployment bundle."""
