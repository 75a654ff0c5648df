# As the service's user, with the tree as the root: a cluster, and an empty database.
PATH=/usr/lib/postgresql/15/bin:/usr/bin
export PATH
initdb -D /data/pg -U service --wal-segsize=1 -A trust --no-sync -E UTF8 --locale=C >/dev/null
cat >> /data/pg/postgresql.conf <<END
listen_addresses = '*'
unix_socket_directories = '/tmp'
max_connections = 16
shared_buffers = 8MB
max_wal_size = 16MB
min_wal_size = 2MB
jit = off
logging_collector = off
END
echo "host all all 0.0.0.0/0 trust" >> /data/pg/pg_hba.conf
pg_ctl -D /data/pg -s -w -o "-c listen_addresses= -c fsync=off" -l /tmp/log start || { cat /tmp/log; exit 1; }
createdb -h /tmp -U service bench
pg_ctl -D /data/pg -s -w stop
rm -f /tmp/log
