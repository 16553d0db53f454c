//! A client of gpushd that a test starts as another user. It needs no library, so it uses little of the processor.
//!
//! ```text
//! socket_client flood  SOCKET CONNECTIONS (METHOD PATH BODY)…   each connection repeats one of the requests
//! socket_client grants SOCKET ROUNDS BODY                       requests and releases a lease, again and again
//! ```
//!
//! `flood` prints `begun` when each connection has an answer, and ends when its standard input is closed. It then prints,
//! for each status, the number of answers and their median time in microseconds. `grants` prints the time of each grant
//! in microseconds, and the id of the lease.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [verb, socket, number, rest @ ..] = arguments.as_slice() else { panic!("see the first comment") };
    let number = number.parse().expect("a number");
    match verb.as_str() {
        "flood" => flood(socket, number, rest),
        "grants" => grants(socket, number, &rest[0]),
        other => panic!("unknown verb {other}"),
    }
}

/// A connection that stays open.
struct Client<'a> {
    socket: &'a str,
    stream: Option<BufReader<UnixStream>>,
}

impl<'a> Client<'a> {
    fn new(socket: &'a str) -> Self {
        Self { socket, stream: None }
    }

    /// Sends a request. Connects first if gpushd has closed the connection. Returns the status and the body; `None` if
    /// gpushd closes the connection instead.
    fn send(&mut self, method: &str, path: &str, body: &str) -> Option<(u16, String)> {
        let answer = self.exchange(method, path, body);
        if answer.is_none() {
            self.stream = None;
        }
        answer
    }

    fn exchange(&mut self, method: &str, path: &str, body: &str) -> Option<(u16, String)> {
        if self.stream.is_none() {
            self.stream = Some(BufReader::new(UnixStream::connect(self.socket).ok()?));
        }
        let stream = self.stream.as_mut()?;
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.1\r\nhost: gpush\r\ncontent-type: application/json\r\n");
        let request = format!("{head}content-length: {length}\r\n\r\n{body}");
        stream.get_mut().write_all(request.as_bytes()).ok()?;
        let (mut status, mut length, mut closes) = (0, 0, false);
        loop {
            let mut line = String::new();
            if stream.read_line(&mut line).ok()? == 0 {
                return None;
            }
            let line = line.trim_end().to_ascii_lowercase();
            if let Some(rest) = line.strip_prefix("http/1.1 ") {
                status = rest.get(..3)?.parse().ok()?;
            } else if let Some(rest) = line.strip_prefix("content-length: ") {
                length = rest.parse().ok()?;
            } else if line == "connection: close" {
                closes = true;
            } else if line.is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).ok()?;
        if closes {
            self.stream = None;
        }
        Some((status, String::from_utf8_lossy(&body).into_owned()))
    }
}

fn flood(socket: &str, connections: usize, requests: &[String]) {
    let (begun, counts) = (AtomicUsize::new(0), Mutex::new(BTreeMap::<u16, Vec<u128>>::new()));
    std::thread::scope(|scope| {
        for at in 0..connections {
            let request = requests.chunks_exact(3).cycle().nth(at).expect("a request");
            let (begun, counts) = (&begun, &counts);
            scope.spawn(move || {
                let mut client = Client::new(socket);
                for round in 0.. {
                    let started = Instant::now();
                    let status = client.send(&request[0], &request[1], &request[2]).map_or(0, |(status, _)| status);
                    let time = started.elapsed().as_micros();
                    counts.lock().expect("no thread panicked").entry(status).or_default().push(time);
                    if round == 0 && begun.fetch_add(1, Ordering::Relaxed) + 1 == connections {
                        println!("begun");
                    }
                }
            });
        }
        let mut end = Vec::new();
        let _ = std::io::stdin().read_to_end(&mut end);
        for (status, times) in &mut *counts.lock().expect("no thread panicked") {
            times.sort_unstable();
            println!("{status} {} {}", times.len(), times[times.len() / 2]);
        }
        std::process::exit(0);
    });
}

fn grants(socket: &str, rounds: usize, body: &str) {
    let mut client = Client::new(socket);
    for _ in 0..rounds {
        let begun = Instant::now();
        let (status, answer) = client.send("POST", "/v1/leases", body).expect("an answer");
        let time = begun.elapsed();
        assert_eq!(status, 200, "{answer}");
        let id = answer.split("\"id\":\"").nth(1).and_then(|rest| rest.split('"').next()).expect("an id");
        let (status, answer) = client.send("POST", &format!("/v1/leases/{id}/release"), "{}").expect("an answer");
        assert_eq!(status, 200, "{answer}");
        println!("{} {id}", time.as_micros());
    }
}
