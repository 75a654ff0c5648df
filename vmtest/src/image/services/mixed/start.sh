# Three services in one guest: redis (every write is on the disk before it is answered), nginx with a file that a client can
# check byte by byte, and PostgreSQL.
chown -R service:service /data
mkdir -p /data/redis /var/lib/nginx /var/log/nginx
seq 1 40000 > /srv/www/numbers
redis-server --port 6379 --bind 0.0.0.0 --protected-mode no --loglevel warning --daemonize no --tcp-keepalive 0 \
    --save "" --appendonly yes --appendfsync always --dir /data/redis &
nginx -c /etc/dunlin/nginx.conf &
exec start-stop-daemon -S -c service:service -x /usr/lib/postgresql/15/bin/postgres -- -D /data/pg
