#!/usr/bin/busybox sh
# First program of a guest that runs one service. The address comes by the kernel's command line: dunlin.ip=ADDRESS/PREFIX
# A disk (vda) with an ext4 file system gets a copy of /data on its first boot and is mounted there.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin LANG=C.UTF-8 HOME=/data
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
mkdir -p /dev/shm /dev/pts
mount -t tmpfs -o mode=1777 none /dev/shm
mount -t devpts none /dev/pts
chmod 1777 /tmp
while read -r module; do insmod "/modules/$module.ko"; done < /modules/order

address=10.77.0.10/16
for word in $(cat /proc/cmdline); do
    case $word in
    dunlin.ip=*) address=${word#dunlin.ip=} ;;
    esac
done
ip link set lo up
ip link set eth0 up
ip addr add "$address" dev eth0
hostname dunlin-guest

if [ -b /dev/vda ] && mkdir /disk && mount -t ext4 /dev/vda /disk; then
    if [ ! -d /disk/data ]; then
        cp -a /data /disk/copying && mv /disk/copying /disk/data && sync
    fi
    mount -o bind /disk/data /data
    echo "dunlin-guest: disk mounted"
fi
# Settings that a test asks for: dunlin.sysctl=NAME=VALUE, as often as wanted.
for word in $(cat /proc/cmdline); do
    case $word in
    dunlin.sysctl=*) sysctl -w "${word#dunlin.sysctl=}" ;;
    esac
done
echo 1 > /proc/sys/vm/overcommit_memory
echo "dunlin-guest: starting the service at $address"
sh /etc/dunlin/start
echo "dunlin-guest: the service ended with $?"
sync
poweroff -f
