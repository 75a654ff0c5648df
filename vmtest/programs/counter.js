// A node server for the tests of bare programs: INCR and GET of redis' protocol.
'use strict';
const net = require('net');
const values = new Map();

function answer(words) {
  const [command, key] = words;
  switch (command.toUpperCase()) {
    case 'INCR': {
      const value = (values.get(key) || 0) + 1;
      values.set(key, value);
      return `:${value}\r\n`;
    }
    case 'GET': {
      const value = values.get(key);
      return value === undefined ? '$-1\r\n' : `$${String(value).length}\r\n${value}\r\n`;
    }
    default:
      return '-ERR unknown command\r\n';
  }
}

// The first request in `text`, and where it ends; nothing if it is not there whole.
function request(text) {
  const lines = text.split('\r\n');
  const count = Number(lines[0].slice(1));
  const needed = 1 + 2 * count;
  if (lines.length <= needed) return null;
  const words = [];
  for (let n = 0; n < count; n += 1) words.push(lines[2 + 2 * n]);
  return { words, end: lines.slice(0, needed).join('\r\n').length + 2 };
}

net.createServer((connection) => {
  let text = '';
  connection.setNoDelay(true);
  connection.on('error', () => connection.destroy());
  connection.on('data', (bytes) => {
    text += bytes.toString('latin1');
    for (let found = request(text); found; found = request(text)) {
      text = text.slice(found.end);
      connection.write(answer(found.words));
    }
  });
}).listen(Number(process.argv[2]), '0.0.0.0');
