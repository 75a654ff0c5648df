# As the service's user, with the tree as the root: system tables, an account without a password, an empty database.
PATH=/usr/sbin:/usr/bin
export PATH
mkdir /data/mysql
mariadb-install-db --no-defaults --datadir=/data/mysql --auth-root-authentication-method=normal --skip-test-db \
    --skip-name-resolve --force --user=root --innodb-log-file-size=4M >/tmp/log 2>&1 || { cat /tmp/log; exit 1; }
mariadbd --no-defaults --user=root --datadir=/data/mysql --socket=/tmp/my.sock --skip-networking --innodb-log-file-size=4M \
    --innodb-flush-log-at-trx-commit=0 >/tmp/log 2>&1 &
server=$!
for try in $(seq 300); do
    mariadb --no-defaults -S /tmp/my.sock -u root -e 'select 1' >/dev/null 2>&1 && break
    kill -0 $server || { cat /tmp/log; exit 1; }
    sleep 0.1
done
mariadb --no-defaults -S /tmp/my.sock -u root -e \
    "create database bench; create user service@'%' identified by ''; grant all on bench.* to service@'%';"
mariadb --no-defaults -S /tmp/my.sock -u root -e 'set global innodb_fast_shutdown=1; shutdown'
wait $server
rm -f /tmp/log
