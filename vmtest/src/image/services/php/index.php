<?php
// A page that computes: primes, a sorted list and a digest, the same for everyone who asks for the same number.
$n = isset($_GET['n']) ? min(5000, (int)$_GET['n']) : 400;
$sieve = array_fill(0, $n + 1, true);
for ($i = 2; $i * $i <= $n; $i++) {
    for ($j = $i * $i; $sieve[$i] && $j <= $n; $j += $i) {
        $sieve[$j] = false;
    }
}
$rows = [];
for ($i = 2; $i <= $n; $i++) {
    if ($sieve[$i]) {
        $rows[md5((string)$i)] = $i;
    }
}
ksort($rows);
header('Content-Type: text/html');
echo "<html><body><h1>Primes to $n</h1><ul>\n";
foreach (array_slice($rows, 0, 20) as $digest => $prime) {
    echo "<li>$prime $digest</li>\n";
}
echo "</ul><p>", hash('sha256', implode(',', $rows)), "</p></body></html>\n";
