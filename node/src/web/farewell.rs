//! The last words to one whom the daemon does not talk to.
//!
//! **Decides**: when they are said. **Flow**: a connection that gets no place -> the beginning of what is asked -> why it gets none -> the end.
//! **Invariant**: nothing is said before something was asked: a client of HTTP takes an answer that comes before its question for a broken connection
//! (RFC 9112, section 9.2), and its user reads no reason. **Not here**: who is turned away (`web`, `door`).

use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

/// Whoever is turned away asks, and hears why, within this time.
const FAREWELL: Duration = Duration::from_secs(1);

/// Says why, if the other end asks and listens, and hangs up.
pub async fn turn_away(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), status: &str, why: &str) {
    let text = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{why}\n",
        why.len() + 1
    );
    let farewell = async {
        let mut asked = [0; 4096];
        if stream.read(&mut asked).await? == 0 {
            return Ok(());
        }
        stream.write_all(text.as_bytes()).await?;
        stream.shutdown().await?;
        // What was asked and not read would make the kernel hang up before the answer is read.
        while stream.read(&mut asked).await? > 0 {}
        Ok::<_, std::io::Error>(())
    };
    let _ = timeout(FAREWELL, farewell).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::client::conn::http1;
    use hyper_util::rt::TokioIo;

    #[test]
    fn whoever_is_turned_away_at_once_reads_why() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let (mut door, visitor) = tokio::io::duplex(64 << 10);
            let mut turned_away = Box::pin(turn_away(&mut door, "503 Service Unavailable", "too many"));
            // All that it says of itself is said before the visitor asks.
            let at_once = timeout(Duration::ZERO, &mut turned_away).await;
            assert!(at_once.is_err(), "it hung up on somebody who had not asked");
            let (mut sender, connection) = http1::handshake(TokioIo::new(visitor))
                .await
                .expect("a connection");
            let request = hyper::Request::builder()
                .header(hyper::header::HOST, "dunlin")
                .body(String::new())
                .expect("a request");
            let asked = tokio::spawn(async move { sender.send_request(request).await });
            tokio::spawn(connection);
            turned_away.await;
            let answer = asked.await.expect("joined").expect("an answer");
            assert_eq!(answer.status(), 503);
        });
    }
}
