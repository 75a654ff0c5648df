# As the service's user, with the tree as the root: a cluster, and pgbench's tables in it.
PATH=/usr/lib/postgresql/15/bin:/usr/bin
export PATH
initdb -D /data/pg --wal-segsize=4 -A trust --no-sync -E UTF8 --locale=C >/dev/null
cat >> /data/pg/postgresql.conf <<END
listen_addresses = '*'
unix_socket_directories = '/tmp'
max_connections = 64
shared_buffers = 48MB
max_wal_size = 64MB
min_wal_size = 16MB
jit = off
logging_collector = off
END
echo "host all all 0.0.0.0/0 trust" >> /data/pg/pg_hba.conf
pg_ctl -D /data/pg -s -w -o "-c listen_addresses= -c fsync=off" -l /tmp/log start || { cat /tmp/log; exit 1; }
createdb -h /tmp bench
pgbench -h /tmp -q -i -s 4 bench
psql -h /tmp -q -c 'vacuum analyze' bench
psql -h /tmp -q -c 'checkpoint' bench
psql -h /tmp -q -c 'select pg_switch_wal()' -c 'checkpoint' bench >/dev/null
pg_ctl -D /data/pg -s -w stop
rm -f /tmp/log
# What only a person would run; the guest's memory is dear.
cd /usr/lib/postgresql/15/bin
rm -f pg_dump* pg_restore pg_basebackup pg_upgrade pg_rewind pg_waldump psql pgbench
