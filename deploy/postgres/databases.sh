#!/bin/sh
# One database and one account for each of the two; runs once, when the volume is empty.
set -eu
for name in nessie dagster; do
	case $name in
	nessie) password=$NESSIE_DB_PASSWORD ;;
	dagster) password=$DAGSTER_DB_PASSWORD ;;
	esac
	psql -v ON_ERROR_STOP=1 -U postgres -v name="$name" -v password="$password" <<-'SQL'
		CREATE ROLE :"name" LOGIN PASSWORD :'password';
		CREATE DATABASE :"name" OWNER :"name";
	SQL
done
