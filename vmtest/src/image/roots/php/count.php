<?php
// How often this session has asked, by the session's file, and a number that is computed of that.
ini_set('session.save_path', '/tmp');
session_start();
$turn = ($_SESSION['count'] ?? 0) + 1;
$_SESSION['count'] = $turn;
session_write_close();
$sum = $turn;
for ($n = 1; $n <= 1000; $n++) {
    $sum = ($sum * 31 + $n * $n) % 1000003;
}
$text = "$turn $sum\n";
header('Content-Type: text/plain');
header('Content-Length: ' . strlen($text));
echo $text;
