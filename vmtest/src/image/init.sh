#!/bin/sh
# The guest's first and only script. The address comes by the kernel's command line: dunlin.ip=ADDRESS/PREFIX,
# and an IPv6 one beside it, if any: dunlin.ip6=ADDRESS/PREFIX
# The first disk with an ext4 file system is mounted on /data, and redis then logs every write to it.
# Each further one has a redis of its own, on the ports from 6380 on.
# A word on the list dunlin:power is obeyed as if a person had typed it: reboot or poweroff. Under a UEFI, remember-NAME makes
# a variable of that name, and dunlin:variables says which there are: at boot and after each such order.
# No timer and no poll runs here: an idle guest must be idle.
/bin/busybox --install -s /bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
[ -d /sys/firmware/efi ] && uefi=yes
while read -r module; do
    [ "$module" = efivarfs ] && [ ! "$uefi" ] && continue
    insmod "/modules/$module.ko"
done < /modules/order
[ "$uefi" ] && mount -t efivarfs variables /sys/firmware/efi/efivars

address=10.77.0.10/16
for word in $(cat /proc/cmdline); do
    case $word in
    dunlin.ip=*) address=${word#dunlin.ip=} ;;
    dunlin.ip6=*) second=${word#dunlin.ip6=} ;;
    esac
done
ip link set lo up
ip link set eth0 up
ip addr add "$address" dev eth0
listen=0.0.0.0
if [ "$second" ]; then
    # No one else has it: it is not asked for first.
    echo 0 > /proc/sys/net/ipv6/conf/eth0/accept_dad
    ip addr add "$second" dev eth0
    listen="0.0.0.0 ::"
fi

persist='--save "" --appendonly no'
for disk in /dev/vda /dev/vdb; do
    if [ -b $disk ] && mount -t ext4 $disk /data 2> /dev/null; then
        persist='--save "" --appendonly yes --appendfsync always --dir /data'
        echo "dunlin-guest: disk mounted"
        break
    fi
done
echo 1 > /proc/sys/vm/overcommit_memory
port=6379
for disk in /dev/vdb /dev/vdc /dev/vdd /dev/vde; do
    grep -q "^$disk " /proc/mounts && continue
    place=/more/${disk#/dev/}
    mkdir -p $place
    if [ -b $disk ] && mount -t ext4 $disk $place 2> /dev/null; then
        port=$((port + 1))
        redis-server --port $port --bind 0.0.0.0 --protected-mode no --loglevel warning --daemonize yes \
            --tcp-keepalive 0 --save "" --appendonly yes --appendfsync always --dir $place
    fi
done
variable=d0d0d0d0-0000-4000-8000-00000000da7a
remember() {
    printf '\007\000\000\000%s' "$1" > "/sys/firmware/efi/efivars/dunlin_$1-$variable"
}
tell_variables() {
    names=
    for file in /sys/firmware/efi/efivars/dunlin_*-$variable; do
        name=${file##*/dunlin_}
        names=$names${name%-$variable},
    done
    # On a connection of its own: what stands before it in the list of orders may wait for ever.
    # While redis loads it refuses the first command, not the second.
    until printf 'SET dunlin:variables "%s"\nQUIT\n' "$names" | nc 127.0.0.1 6379 2> /dev/null | head -n 1 | grep -q +OK; do
        sleep 1
    done
}
[ "$uefi" ] && tell_variables &
# As a distribution's shutdown does. With a card that is up, Linux 6.1.192 may send for ever: it breaks the card's queue first, and
# start_xmit waits for what a broken queue never gives.
quiet() {
    ip link set eth0 down
}
# Tries again only until redis answers; then it waits without a timer.
obey() {
    mkfifo /orders
    exec 3<> /orders
    while :; do
        echo 'BLPOP dunlin:power 0' >&3
        nc 127.0.0.1 6379 <&3 2> /dev/null | while read -r word; do
            case $word in
            reboot*) quiet; reboot -f ;;
            poweroff*) quiet; poweroff -f ;;
            remember-*)
                word=${word%?}
                remember "${word#remember-}"
                tell_variables
                echo 'BLPOP dunlin:power 0' >&3
                ;;
            -LOADING*) sleep 1; echo 'BLPOP dunlin:power 0' >&3 ;;
            esac
        done
        sleep 1
    done
}
obey &
echo "dunlin-guest: starting redis at $address"
eval redis-server --port 6379 --bind $listen --protected-mode no --loglevel warning --daemonize no \
    --tcp-keepalive 0 --tcp-backlog 128 "$persist"
echo "dunlin-guest: redis ended with $?"
sync
poweroff -f
