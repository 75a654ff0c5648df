# One connection, one fio: its arguments come as a line, its JSON goes back.
exec nc -ll -p 8765 -e /usr/bin/busybox sh /etc/dunlin/job
