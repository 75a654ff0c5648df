exec node /etc/dunlin/server.js
