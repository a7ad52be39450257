-- First start of the database: the role and the database of Hindsight, and the extension that only a superuser may add.
-- The password is read by the shell command in backquotes; no statement is logged.
set log_statement = 'none';
set log_min_error_statement = 'panic';
\set password `cat /run/secrets/postgres/hindsight-password`
create role hindsight login password :'password';
create database hindsight owner hindsight;
\connect hindsight
create extension vector;
create extension pg_trgm;
create extension btree_gin;
