mkdir -p /run /var/tmp
exec lighttpd -D -f /etc/dunlin/lighttpd.conf
