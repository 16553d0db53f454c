//! A plain HTTP client with one persistent connection. The client can connect as any user of the
//! host.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::{Duration, Instant},
};

use nix::unistd::{Gid, Uid, getegid, geteuid, setegid, seteuid};

/// Returns the uids of users, [`NOBODY`] and the uids before it.
pub(crate) fn users(number: usize) -> Vec<u32> {
    (0..number).map(|user| NOBODY - u32::try_from(user).expect("a few")).collect()
}

/// Returns a `/etc/subuid` with which each of [`users`] has limits of its own. Without it, the uids without a user would
/// share one account.
pub(crate) fn accounts(number: usize) -> String {
    users(number).iter().map(|uid| format!("{uid}:{uid}:1\n")).collect()
}

/// A uid and gid that own no files.
pub(crate) const NOBODY: u32 = 65534;

/// A connection.
pub(crate) struct Client(BufReader<UnixStream>);

impl Client {
    /// Connects as the current user.
    pub(crate) fn connect(socket: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        Ok(Self(BufReader::with_capacity(256 << 10, stream)))
    }

    /// Connects as the user `uid`. The kernel records this user for the server when the client
    /// connects. Without root, connects as the current user. Two threads must not call this
    /// function at the same time, because a process has only one effective user.
    pub(crate) fn connect_as(uid: u32, socket: &Path) -> io::Result<Self> {
        if !geteuid().is_root() {
            return Self::connect(socket);
        }
        let own = (geteuid(), getegid());
        setegid(Gid::from_raw(uid))?;
        seteuid(Uid::from_raw(uid))?;
        let client = Self::connect(socket);
        seteuid(own.0)?;
        setegid(own.1)?;
        client
    }

    /// Sends a request and reads the whole response. Returns the status, the body, and the duration
    /// in seconds.
    pub(crate) fn ask(&mut self, method: &str, path: &str, body: &str) -> io::Result<(u16, Vec<u8>, f64)> {
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: gpush\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let asked = Instant::now();
        self.0.get_mut().write_all(request.as_bytes())?;
        let (mut status, mut length, mut line) = (0, 0, String::new());
        loop {
            line.clear();
            if self.0.read_line(&mut line)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let head = line.trim_end().to_ascii_lowercase();
            if let Some(rest) = head.strip_prefix("http/1.1 ") {
                status = rest.get(..3).and_then(|code| code.parse().ok()).unwrap_or(0);
            } else if let Some(rest) = head.strip_prefix("content-length:") {
                length = rest.trim().parse().unwrap_or(0);
            } else if head.is_empty() {
                break;
            }
        }
        let mut answer = vec![0; length];
        self.0.read_exact(&mut answer)?;
        Ok((status, answer, asked.elapsed().as_secs_f64()))
    }

    /// Sends a request whose response must have `status`. Returns its duration in seconds.
    ///
    /// # Panics
    /// If the response has another status.
    pub(crate) fn timed(&mut self, method: &str, path: &str, body: &str, status: u16) -> f64 {
        let (answered, body, took) = self.ask(method, path, body).expect("an answer");
        assert_eq!(answered, status, "{method} {path}: {}", String::from_utf8_lossy(&body));
        took
    }
}
