chown -R service:service /data
exec start-stop-daemon -S -c service:service -x /usr/lib/postgresql/15/bin/postgres -- -D /data/pg
