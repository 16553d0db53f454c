//! Tests of `gpushctl metrics serve` without TLS.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Instant,
};

use super::{
    relay::{Relay, exchange, request},
    *,
};

#[test]
fn relay_without_password_serves_only_what_every_user_sees() {
    let host = Host::new();
    let agent = agent(&host);
    let relay = Relay::start(&host, &[]);
    let answer = relay.get("/metrics", &[]);
    assert_eq!((answer.status, answer.body.as_str()), (200, PUBLIC));
    assert!(answer.head.contains(&format!("content-type: {CLASSIC}")), "{}", answer.head);
    // Credentials and parameters of a scraper change nothing.
    let answer = relay.get("/metrics?labels=all", &[("authorization", "Basic YW5uYTphbm5h")]);
    assert_eq!((answer.status, answer.body.as_str()), (200, PUBLIC));
    let answer = relay.get("/metrics", &[("accept", "application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.1")]);
    assert!(answer.head.contains(&format!("content-type: {OPEN_METRICS}")), "{}", answer.head);
    assert!(agent.asked().iter().all(|asked| asked == "GET /metrics?labels=public"), "{:?}", agent.asked());
}

#[test]
fn relay_answers_get_of_two_paths_and_nothing_else() {
    let host = Host::new();
    let agent = agent(&host);
    let relay = Relay::start(&host, &[]);
    let page = relay.get("/", &[]);
    assert!(page.status == 200 && page.body.contains("href=\"/metrics\"") && page.body.lines().count() == 1);
    for path in ["/v1/gpus", "/metrics/", "//metrics", "/../metrics"] {
        assert_eq!(relay.get(path, &[]).status, 404, "{path}");
    }
    for method in ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"] {
        let answer = exchange(&mut relay.connect(), &request(method, "/metrics", &[]));
        assert_eq!(answer.status, 405, "{method}");
        assert!(answer.head.contains("allow: get"));
    }
    let head = format!("{}\r\n", "x".repeat(100_000));
    let answer = exchange(&mut relay.connect(), &request("GET", "/metrics", &[("x", &head)]));
    assert_eq!(answer.status, 431);
    assert_eq!(agent.asked(), [] as [&str; 0], "gpushd got no request");
}

#[test]
fn relay_without_gpushd_answers_503_until_gpushd_is_back() {
    let host = Host::new();
    let mut relay = Relay::start(&host, &[]);
    let answer = relay.get("/metrics", &[]);
    assert_eq!(answer.status, 503);
    assert!(answer.body.starts_with("gpushd sent no metrics: ") && answer.body.lines().count() == 1, "{}", answer.body);
    relay.lines_until("gpushd sent no metrics");
    agent(&host);
    // The relay keeps the failure for a second.
    let began = Instant::now();
    while relay.get("/metrics", &[]).status != 200 {
        assert!(began.elapsed().as_secs() < 60, "still no metrics");
    }
    assert_eq!(relay.lines_until("again"), "gpushd sends metrics again\n", "one line for many failures");
}

/// 2,000 scrapes, of which up to 16 arrive together, cost gpushd about one request a second.
#[test]
fn many_scrapes_cost_few_requests() {
    let host = Host::new();
    let agent = agent(&host);
    let relay = Relay::start(&host, &[]);
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                for _ in 0..125 {
                    assert_eq!(relay.get("/metrics", &[]).body, PUBLIC);
                }
            });
        }
    });
    let (requests, seconds) = (agent.asked().len() as u64, began.elapsed().as_secs());
    assert!(requests <= seconds + 2, "{requests} requests in {seconds} s");
}

/// Scrapers that send half a request, or do not read their answer, occupy only their own connections.
#[test]
fn slow_scrapers_delay_no_other_scraper() {
    let host = Host::new();
    let large = format!("# {}\n", "x".repeat(32 << 20));
    Agent::listen(&host.path("gpushd.sock"), move |_| Answer::Text(CLASSIC, large.clone()));
    let relay = Relay::start(&host, &[]);
    let slow: Vec<TcpStream> = (0..40)
        .map(|n| {
            let mut stream = relay.connect();
            let text = request("GET", "/metrics", &[]);
            stream.write_all(&text.as_bytes()[..if n % 2 == 0 { text.len() } else { 20 }]).unwrap();
            if n % 2 == 0 {
                // The answer has begun, and the scraper reads no more of it.
                stream.read_exact(&mut [0]).unwrap();
            }
            stream
        })
        .collect();
    assert_eq!(relay.get("/metrics", &[]).body.len(), (32 << 20) + 3);
    assert_eq!(relay.get("/", &[]).status, 200);
    drop(slow);
}

#[test]
fn one_address_cannot_take_all_connections() {
    let host = Host::new();
    agent(&host);
    let relay = Relay::start(&host, &[]);
    let idle: Vec<TcpStream> = (0..128).map(|_| relay.connect()).collect();
    let mut refused = relay.connect();
    assert_eq!(refused.read(&mut [0]).unwrap_or(0), 0, "the relay closes the connection");
    let mut stream = connect_from(SocketAddr::from(([127, 0, 0, 2], 0)), relay.address);
    assert_eq!(exchange(&mut stream, &request("GET", "/metrics", &[])).status, 200);
    drop(idle);
}

/// Connects from this local address.
fn connect_from(from: SocketAddr, to: SocketAddr) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
    let stream = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(from).unwrap();
        socket.connect(to).await.unwrap().into_std().unwrap()
    });
    stream.set_nonblocking(false).unwrap();
    stream
}

#[test]
fn address_that_others_can_reach_is_refused_without_tls_and_password() {
    let host = Host::new();
    host.write("web.yml", "basic_auth_users:\n  anna: $2y$04$abcdefghijklmnopqrstuuPZbVvVEeJ5Ub7WmH0Zq1rYxN1u0Ck2C\n");
    host.write("wrong.yml", "tls_server_config:\n  cert_fle: a\n");
    let mut text = host.run(&["metrics", "serve", "--listen", "0.0.0.0:0"]);
    text += &host.run(&["metrics", "serve", "--listen", "0.0.0.0:0", "--web-config", "web.yml"]);
    text += &host.run(&["metrics", "serve", "--web-config", "wrong.yml"]);
    text += &host.run(&["metrics", "serve", "--web-config", "none.yml"]);
    text += &host.run(&["metrics", "serve", "--listen", "localhost:9945"]);
    insta::assert_snapshot!(text);
}

/// Fault: with `-o json`, a caller did not learn the port of the relay.
#[test]
fn relay_prints_its_address_as_a_document() {
    let host = Host::new();
    agent(&host);
    let mut command = host.command(&["metrics", "serve", "--listen", "127.0.0.1:0", "-o", "json"]);
    let mut child = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut document = serde_json::Deserializer::from_reader(child.stdout.take().unwrap()).into_iter();
    let served: serde_json::Value = document.next().unwrap().unwrap();
    let url = served["url"].as_str().unwrap();
    let address = url.strip_prefix("http://").and_then(|url| url.strip_suffix("/metrics")).unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    assert_eq!(exchange(&mut stream, &request("GET", "/metrics", &[])).body, PUBLIC);
    assert_eq!(served["has_password"], false);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn used_port_is_named() {
    let host = Host::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let text = host.run(&["metrics", "serve", "--listen", &address]);
    assert!(text.contains(&format!("cannot listen on {address}")) && text.contains("ss -ltnp"), "{text}");
}
