//! The API as plain HTTP. An error of HTTP is answered in JSON, and no client can block gpushd.

use std::{
    io::{Read, Write},
    time::Duration,
};

use gpush_api::Code;
use gpush_tests::{
    agent::{Agent, parse},
    host::Host,
};
use serde_json::Value;

#[test]
fn head_that_is_not_http_is_answered_in_json() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    let long = format!("GET /v1/version HTTP/1.1\r\nhost: x\r\nx-long: {}\r\n\r\n", "x".repeat(20_000));
    let many = format!("GET /v1/version HTTP/1.1\r\nhost: x\r\n{}\r\n", "a: b\r\n".repeat(200));
    let path = format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "x".repeat(70_000));
    for (bytes, statuses) in [
        (&b"this is not HTTP\r\n\r\n"[..], &[400][..]),
        (b"GET /v1/version HTTP/1.1\r\nho st: x\r\n\r\n", &[400]),
        (b"GET /v1/version HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n", &[400]),
        (long.as_bytes(), &[431]),
        (many.as_bytes(), &[431]),
        (path.as_bytes(), &[414, 431]),
    ] {
        let answer = parse(&agent.raw(bytes)).unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(bytes)));
        assert!(statuses.contains(&answer.status), "{}", answer.head);
        let error = answer.error();
        assert!(error.code == Code::BadRequest && error.hint.is_some(), "{error:?}");
    }
    // On one connection, an invalid head follows a valid request.
    let mixed = b"GET /v1/version HTTP/1.1\r\nhost: x\r\n\r\nnot HTTP\r\n\r\n";
    assert!(agent.raw(mixed).starts_with(b"HTTP/1.1 200 "));
}

#[test]
fn incomplete_request_head_times_out() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    let rest = |start: &[u8]| {
        let mut slow = agent.connect();
        slow.write_all(start).unwrap();
        // While the incomplete connection is still open, the agent answers other clients.
        assert_eq!(agent.get("/v1/version").status, 200);
        let mut rest = Vec::new();
        let _ = slow.read_to_end(&mut rest);
        rest
    };
    std::thread::scope(|scope| {
        for start in [&b""[..], b"GET /v1/gpus HTTP/1.1\r\nhost: x\r\n"] {
            scope.spawn(|| {
                let rest = rest(start);
                assert!(rest.is_empty() || parse(&rest).unwrap().status >= 400, "{}", String::from_utf8_lossy(&rest));
            });
        }
        // If the body of a request does not arrive, the agent answers 408 when the time limit for the
        // body has passed.
        let rest = rest(
            b"POST /v1/mig/plan HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{",
        );
        assert_eq!(parse(&rest).unwrap().status, 408, "{}", String::from_utf8_lossy(&rest));
    });
}

/// A client that sends single bytes must not get more time than a client that sends nothing.
#[test]
fn client_sending_byte_by_byte_times_out() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    let body = format!("{{\"selectors\": [{}\"0\"]}}", " ".repeat(500));
    let head = "POST /v1/mig/plan HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: ";
    let long = format!("GET /v1/version HTTP/1.1\r\nhost: x\r\nx-filler: {}\r\n\r\n", "x".repeat(500));
    let slow = |at_once: String, byte_by_byte: String| {
        let mut stream = agent.connect();
        stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        stream.write_all(at_once.as_bytes()).unwrap();
        let (mut sent, mut answer) = (0, Vec::new());
        let mut buffer = [0; 4096];
        // After each byte, the test waits up to 100 ms for a response. This wait is the pause
        // between two bytes.
        for byte in byte_by_byte.bytes() {
            if stream.write_all(&[byte]).is_err() {
                break;
            }
            sent += 1;
            match stream.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => answer.extend(&buffer[..length]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => break,
            }
        }
        assert!(sent < byte_by_byte.len(), "all of it was waited for");
        assert_eq!(agent.get("/v1/version").status, 200);
        (sent, parse(&answer).map(|answer| answer.status))
    };
    std::thread::scope(|scope| {
        let head_of_body = format!("{head}{}\r\n\r\n", body.len());
        let of_body = scope.spawn(|| slow(head_of_body, body));
        let (of_head, answer) = slow(String::new(), long);
        assert!(answer.is_none_or(|status| status >= 400), "{answer:?}");
        let (of_body, answer) = of_body.join().unwrap();
        assert_eq!(answer, Some(408));
        println!("closed after {of_head} bytes of a head, {of_body} of a body");
    });
}

/// If a client sends more than the maximum size of a request, gpushd reads only up to this size.
#[test]
fn ten_megabyte_body_is_refused_before_it_is_read() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    let most = 10 << 20;
    let head = "POST /v1/mig/plan HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";
    let reported = format!("{head}content-length: {most}\r\n\r\n");
    // Send one request with a content length, and one without.
    let chunked = format!("{head}transfer-encoding: chunked\r\n\r\n{most:x}\r\n");
    let mut tried = 0;
    for start in [reported, chunked] {
        let mut stream = agent.connect();
        stream.write_all(start.as_bytes()).unwrap();
        let piece = vec![b' '; 64 << 10];
        let mut sent = 0;
        while sent < most && stream.write_all(&piece).is_ok() {
            sent += piece.len();
        }
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(sent < most, "all of it was taken");
        // The test was still writing when gpushd closed the connection, so the kernel may have
        // dropped the response.
        if let Some(answer) = parse(&answer) {
            assert_eq!(answer.status, 413);
        }
        assert_eq!(agent.get("/v1/version").status, 200);
        tried += 1;
    }
    println!("{tried} large bodies refused");
}

#[test]
fn connection_carries_several_requests() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    let mut stream = agent.connect();
    for _ in 0..3 {
        stream.write_all(b"GET /v1/version HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        let mut read = Vec::new();
        let mut byte = [0];
        while !read.ends_with(b"\r\n\r\n") {
            stream.read_exact(&mut byte).unwrap();
            read.push(byte[0]);
        }
        let head = String::from_utf8(read).unwrap();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap().parse().unwrap();
        let mut body = vec![0; length];
        stream.read_exact(&mut body).unwrap();
        assert_eq!(serde_json::from_slice::<Value>(&body).unwrap()["api"], "v1");
    }
}
