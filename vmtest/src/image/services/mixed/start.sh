# Three services in one guest: redis (every write is on the disk before it is answered), nginx with a file that a client can
# check byte by byte, and PostgreSQL.
# A word on redis' list dunlin:power is obeyed as if a person had typed it: reboot.
chown -R service:service /data
# After a reboot without a shutdown another process may have the number that this names.
rm -f /data/pg/postmaster.pid
mkdir -p /data/redis /var/lib/nginx /var/log/nginx
seq 1 40000 > /srv/www/numbers
redis-server --port 6379 --bind 0.0.0.0 --protected-mode no --loglevel warning --daemonize no --tcp-keepalive 0 \
    --save "" --appendonly yes --appendfsync always --dir /data/redis &
nginx -c /etc/dunlin/nginx.conf &
restart() {
    echo "dunlin-guest: reboots" > /dev/console
    # If the kernel does not get on, it says what it does.
    echo 8 > /proc/sys/kernel/printk
    # As a distribution's shutdown does. With a card that is up, Linux 6.1.192 may send for ever: it breaks the card's queue first,
    # and start_xmit waits for what a broken queue never gives.
    ip link set eth0 down
    reboot -f
}
obey() {
    mkfifo /orders
    exec 3<> /orders
    while :; do
        echo 'BLPOP dunlin:power 0' >&3
        nc 127.0.0.1 6379 <&3 2> /dev/null | while read -r word; do
            case $word in
            reboot*) restart ;;
            -LOADING*) sleep 1; echo 'BLPOP dunlin:power 0' >&3 ;;
            esac
        done
        sleep 1
    done
}
# Tries again only until redis answers; then it waits without a timer.
obey &
exec start-stop-daemon -S -c service:service -x /usr/lib/postgresql/15/bin/postgres -- -D /data/pg
