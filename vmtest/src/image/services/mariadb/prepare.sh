# As the service's user, with the tree as the root: system tables, an account, and sysbench's tables.
PATH=/usr/sbin:/usr/bin
export PATH
mkdir /data/mysql
mariadb-install-db --no-defaults --datadir=/data/mysql --auth-root-authentication-method=normal --skip-test-db \
    --skip-name-resolve >/tmp/log 2>&1 || { cat /tmp/log; exit 1; }
mariadbd --no-defaults --datadir=/data/mysql --socket=/tmp/my.sock --skip-networking --innodb-log-file-size=32M \
    --innodb-flush-log-at-trx-commit=0 >/tmp/log 2>&1 &
server=$!
for try in $(seq 300); do
    mariadb --no-defaults -S /tmp/my.sock -u root -e 'select 1' >/dev/null 2>&1 && break
    kill -0 $server || { cat /tmp/log; exit 1; }
    sleep 0.1
done
mariadb --no-defaults -S /tmp/my.sock -u root -e \
    "create database sbtest; create user bench@'%' identified by 'bench'; grant all on sbtest.* to bench@'%';"
sysbench oltp_read_write --db-driver=mysql --mysql-socket=/tmp/my.sock --mysql-user=root --mysql-db=sbtest \
    --tables=4 --table-size=5000 prepare >/tmp/log2 2>&1 || { cat /tmp/log2; exit 1; }
mariadb --no-defaults -S /tmp/my.sock -u root -e 'set global innodb_fast_shutdown=1; shutdown'
wait $server
rm -f /tmp/log /tmp/log2
# What only a person would run; the guest's memory is dear.
cd /usr/bin
rm -f myisam* aria_* mariadb* mysql* my_print_defaults replace resolve* innochecksum perror sysbench
