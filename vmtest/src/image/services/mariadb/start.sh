exec mariadbd --no-defaults --user=root --datadir=/data/mysql --socket=/tmp/my.sock --bind-address=0.0.0.0 \
    --skip-name-resolve --innodb-buffer-pool-size=64M --innodb-log-file-size=32M --innodb-flush-method=fsync \
    --innodb-use-native-aio=0 --performance-schema=off
