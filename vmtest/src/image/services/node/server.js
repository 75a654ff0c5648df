// A small service: a list of orders as JSON, with totals computed for each request.
const http = require('http');
const orders = [];
for (let i = 0; i < 40; i++) orders.push({ id: i, item: 'item-' + (i * 7919 % 101), count: i % 9 + 1, cents: i * 137 % 5000 });
http.createServer((request, response) => {
  const total = orders.reduce((sum, order) => sum + order.count * order.cents, 0);
  const body = JSON.stringify({ path: request.url, orders, total });
  response.writeHead(200, { 'Content-Type': 'application/json', 'Content-Length': Buffer.byteLength(body) });
  response.end(body);
}).listen(80, '0.0.0.0');
