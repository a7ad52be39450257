#!/bin/bash
# Entry point of the PostgreSQL image: prepares the data directory on first start, then becomes the server.
#
#   POSTGRES_PASSWORD    password of the superuser; needed on first start
#   POSTGRES_USER        name of the superuser (postgres)
#   POSTGRES_DB          database to create (the name of the superuser)
#   POSTGRES_INITDB_ARGS more options of initdb, quoted as in a shell command line
#   POSTGRES_INITDB_WALDIR     directory for the write-ahead log
#   POSTGRES_HOST_AUTH_METHOD  method for connections from other hosts (the server's password_encryption)
#
# Each of the first four may be given as a file instead: POSTGRES_PASSWORD_FILE and so on.
# On first start the files of /docker-entrypoint-initdb.d run in the order of their names against a server
# that listens on its socket only: *.sh (run if executable, else sourced), *.sql, *.sql.gz, *.sql.xz, *.sql.zst.
set -Eeuo pipefail

incomplete_mark="first-start-incomplete"

fail() {
    printf 'postgres entry point: %s\n' "$1" >&2
    shift
    printf '    %s\n' "$@" >&2
    exit 1
}

say() {
    printf 'postgres entry point: %s\n' "$1"
}

# Sets variable $1 from itself, from the file named by $1_FILE, or to the default $2.
from_file() {
    local name=$1 default=${2:-} file_name=${1}_FILE value
    if [[ -n ${!name:-} && -n ${!file_name:-} ]]; then
        fail "both $name and $file_name are set" "Only one of them can be meant." "Unset one of them."
    fi
    value=${!name:-$default}
    if [[ -n ${!file_name:-} ]]; then
        [[ -r ${!file_name} ]] || fail "$file_name names ${!file_name}, which user $(id -u) cannot read" \
            "The setting is taken from that file." "Mount the file readable for uid $(id -u)."
        value=$(<"${!file_name}")
    fi
    printf -v "$name" '%s' "$value"
    export "${name?}"
    unset "$file_name"
}

prepare_directories() {
    local uid
    uid=$(id -u)
    mkdir -p "$PGDATA" /var/run/postgresql || :
    chmod 0700 "$PGDATA" || :
    if [[ $uid == 0 ]]; then
        find "$PGDATA" \! -user postgres -exec chown postgres:postgres '{}' +
        chown postgres:postgres /var/run/postgresql
        if [[ -n ${POSTGRES_INITDB_WALDIR:-} ]]; then
            mkdir -p "$POSTGRES_INITDB_WALDIR"
            chmod 0700 "$POSTGRES_INITDB_WALDIR"
            chown -R postgres:postgres "$POSTGRES_INITDB_WALDIR"
        fi
    fi
}

refuse_unusable_directory() {
    [[ -d $PGDATA && -w $PGDATA ]] || fail "user $(id -u) cannot write to $PGDATA" \
        "The database lives there." "Give the volume to uid $(id -u), or start the container once as root."
}

refuse_missing_password() {
    if [[ -z $POSTGRES_PASSWORD && ${POSTGRES_HOST_AUTH_METHOD:-} != trust ]]; then
        fail "no superuser password is given" \
            "A database without one would be open to everybody who reaches its port." \
            "Set POSTGRES_PASSWORD_FILE to a mounted file that holds the password."
    fi
}

init_database() {
    local -a options=(--pgdata "$PGDATA" --username "$POSTGRES_USER")
    local -a extra=()
    if [[ -n ${POSTGRES_INITDB_WALDIR:-} ]]; then
        options+=(--waldir "$POSTGRES_INITDB_WALDIR")
    fi
    if [[ -n $POSTGRES_INITDB_ARGS ]]; then
        mapfile -t extra < <(xargs -n 1 printf '%s\n' <<<"$POSTGRES_INITDB_ARGS")
    fi
    if [[ -n $POSTGRES_PASSWORD ]]; then
        initdb "${options[@]}" "${extra[@]}" --pwfile=<(printf '%s\n' "$POSTGRES_PASSWORD")
    else
        initdb "${options[@]}" "${extra[@]}"
    fi
    touch "$PGDATA/$incomplete_mark"
}

allow_network() {
    local method=${POSTGRES_HOST_AUTH_METHOD:-}
    if [[ -z $method ]]; then
        method=$(postgres -C password_encryption -D "$PGDATA")
    fi
    printf '\nhost all all all %s\n' "$method" >>"$PGDATA/pg_hba.conf"
}

# Runs psql on the temporary server; the database defaults to POSTGRES_DB.
process_sql() {
    PGHOST='' PGHOSTADDR='' psql -v ON_ERROR_STOP=1 --no-psqlrc --username "$POSTGRES_USER" --no-password \
        --dbname "${SQL_DATABASE-$POSTGRES_DB}" "$@"
}

create_database() {
    local exists
    exists=$(SQL_DATABASE=postgres process_sql --tuples-only --set db="$POSTGRES_DB" \
        <<<"SELECT 1 FROM pg_database WHERE datname = :'db';")
    if [[ -z ${exists//[[:space:]]/} ]]; then
        SQL_DATABASE=postgres process_sql --set db="$POSTGRES_DB" <<<'CREATE DATABASE :"db";'
    fi
}

run_init_files() {
    local file
    for file in /docker-entrypoint-initdb.d/*; do
        case $file in
            *.sh)
                say "running $file"
                if [[ -x $file ]]; then
                    "$file"
                else
                    # shellcheck source=/dev/null
                    . "$file"
                fi
                ;;
            *.sql) say "running $file" && process_sql -f "$file" ;;
            *.sql.gz) say "running $file" && gunzip -c "$file" | process_sql ;;
            *.sql.xz) say "running $file" && xzcat "$file" | process_sql ;;
            *.sql.zst) say "running $file" && zstd -dc "$file" | process_sql ;;
            */\*) ;;
            *) say "ignoring $file" ;;
        esac
    done
}

first_start() {
    refuse_missing_password
    init_database
    allow_network
    export PGPASSWORD=$POSTGRES_PASSWORD
    NOTIFY_SOCKET='' pg_ctl --pgdata "$PGDATA" --wait start \
        -o "-c listen_addresses='' -p ${PGPORT:-5432}"
    create_database
    run_init_files
    pg_ctl --pgdata "$PGDATA" --mode fast --wait stop
    unset PGPASSWORD
    rm -f "$PGDATA/$incomplete_mark"
    say "first start is complete"
}

wants_information() {
    local word
    for word in "$@"; do
        case $word in
            -\? | --help | --describe-config | -V | --version) return 0 ;;
        esac
    done
    return 1
}

main() {
    if [[ ${1:-} == -* || $# == 0 ]]; then
        set -- postgres "$@"
    fi
    if [[ $1 == postgres ]] && ! wants_information "$@"; then
        prepare_directories
        if [[ $(id -u) == 0 ]]; then
            exec setpriv --reuid=postgres --regid=postgres --init-groups -- "${BASH_SOURCE[0]}" "$@"
        fi
        refuse_unusable_directory
        if [[ ! -s $PGDATA/PG_VERSION ]]; then
            from_file POSTGRES_PASSWORD
            from_file POSTGRES_USER postgres
            from_file POSTGRES_DB "$POSTGRES_USER"
            from_file POSTGRES_INITDB_ARGS
            first_start
        elif [[ -e $PGDATA/$incomplete_mark ]]; then
            fail "the first start of the database in $PGDATA was interrupted" \
                "Roles, databases or extensions may be missing, so it must not serve." \
                "It never held data of yours: remove the volume and start again."
        fi
        unset POSTGRES_PASSWORD POSTGRES_PASSWORD_FILE
    fi
    exec "$@"
}

main "$@"
