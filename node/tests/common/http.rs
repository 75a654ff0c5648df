//! Requests as bytes, and answers: what is judged is what goes over the connection.

use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// An answer: status, head, body.
#[derive(Debug)]
pub struct Said {
    /// 200 and so on.
    pub status: u16,
    /// In lower case.
    #[allow(dead_code, reason = "not every test looks at heads")]
    pub head: String,
    /// The rest.
    pub body: String,
}

impl Said {
    /// Of a whole answer.
    pub fn of(text: &str) -> Result<Self> {
        let (head, body) = text
            .split_once("\r\n\r\n")
            .with_context(|| format!("no answer: {text}"))?;
        let status = head.split(' ').nth(1).context("a status")?.parse()?;
        Ok(Self {
            status,
            head: head.to_ascii_lowercase(),
            body: body.to_owned(),
        })
    }

    /// The body.
    pub fn json(&self) -> Result<Value> {
        serde_json::from_str(&self.body).with_context(|| format!("no JSON: {self:?}"))
    }
}

/// A request, after which the connection ends.
pub fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> String {
    let mut text = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n");
    if !headers.iter().any(|(name, _)| *name == "Host") {
        text.push_str("Host: localhost\r\n");
    }
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text + &format!("Content-Length: {}\r\n\r\n{body}", body.len())
}

/// Bash has sockets, and is on every host.
#[allow(dead_code, reason = "one test has TLS")]
pub fn speak(mut shell: Command, page: SocketAddr, text: &str) -> Result<Said> {
    let script = format!(
        "exec 3<>/dev/tcp/{}/{} && cat >&3 && cat <&3",
        page.ip(),
        page.port()
    );
    let mut child = shell
        .args(["-c", &script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()?;
    child
        .stdin
        .take()
        .context("its input")?
        .write_all(text.as_bytes())?;
    let output = child.wait_with_output()?;
    Said::of(&String::from_utf8_lossy(&output.stdout))
}

/// By the daemon's own socket, as another user (number, and number of the group). Perl is on every Debian, and has such sockets.
#[allow(dead_code, reason = "not every test has other users")]
pub fn by_socket(api: &Path, user: (u32, u32), text: &str) -> Result<Said> {
    const SCRIPT: &str = "my $s = IO::Socket::UNIX->new(Peer => shift) or die qq(refused: $!\\n); local $/; print $s scalar <STDIN>; $s->flush; print <$s>;";
    let mut perl = Command::new("/usr/bin/perl")
        .args(["-MIO::Socket::UNIX", "-e", SCRIPT])
        .arg(api)
        .uid(user.0)
        .gid(user.1)
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    perl.stdin
        .take()
        .context("its input")?
        .write_all(text.as_bytes())?;
    let output = perl.wait_with_output()?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Said::of(&String::from_utf8_lossy(&output.stdout))
}
