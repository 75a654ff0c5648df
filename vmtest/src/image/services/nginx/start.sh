mkdir -p /var/lib/nginx /var/log/nginx
exec nginx -c /etc/dunlin/nginx.conf
