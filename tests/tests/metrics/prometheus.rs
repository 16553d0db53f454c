//! A Prometheus on the loopback interface.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use gpush_tests::agent::{PATIENCE, parse};
use serde_json::Value;

/// A running Prometheus. Dropping this value kills it.
#[derive(Debug)]
pub(crate) struct Prometheus {
    child: Child,
    address: SocketAddr,
    log: PathBuf,
}

impl Prometheus {
    /// Starts this program, which scrapes `target` 5 times a second and evaluates `rules` as often. Waits until it is
    /// ready.
    pub(crate) fn start(program: &Path, dir: &Path, target: SocketAddr, rules: &str) -> Self {
        fs::write(dir.join("rules.yml"), rules).expect("a file");
        let config = format!(
            "global: {{scrape_interval: 200ms, scrape_timeout: 200ms, evaluation_interval: 200ms}}\n\
             rule_files: [rules.yml]\n\
             scrape_configs: [{{job_name: gpush, static_configs: [{{targets: ['{target}']}}]}}]\n"
        );
        fs::write(dir.join("prometheus.yml"), config).expect("a file");
        // Prometheus does not report the port that the kernel chooses for port 0.
        let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port");
        let log = dir.join("prometheus.log");
        let child = Command::new(program)
            .arg(format!("--config.file={}", dir.join("prometheus.yml").display()))
            .arg(format!("--storage.tsdb.path={}", dir.join("prometheus.data").display()))
            .arg(format!("--web.listen-address={free}"))
            // A series without a new point ends soon.
            .arg("--query.lookback-delta=5s")
            .stdout(Stdio::null())
            .stderr(File::create(&log).expect("a file"))
            .spawn()
            .expect("Prometheus can be started");
        let prometheus = Self { child, address: free, log };
        prometheus.until(|| match prometheus.request("GET /-/ready", "") {
            Some((200, _)) => Ok(()),
            other => Err(format!("Prometheus is not ready: {other:?}")),
        });
        prometheus
    }

    /// Returns the results of a query.
    ///
    /// # Panics
    /// If Prometheus refuses the query.
    pub(crate) fn query(&self, expr: &str) -> Vec<Value> {
        let body = format!("query={}", encoded(expr));
        let (code, answer) = self.request("POST /api/v1/query", &body).expect("an answer");
        assert_eq!(code, 200, "{expr}: {answer}");
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        answer["data"]["result"].as_array().expect("results").clone()
    }

    /// Returns the names of the alerts that fire now, with their summaries and descriptions.
    pub(crate) fn firing(&self) -> BTreeMap<String, Vec<String>> {
        let (_, answer) = self.request("GET /api/v1/alerts", "").expect("an answer");
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        let alerts = answer["data"]["alerts"].as_array().expect("alerts");
        let firing = alerts.iter().filter(|alert| alert["state"] == "firing").map(|alert| {
            let name = alert["labels"]["alertname"].as_str().expect("a name").to_owned();
            let texts = alert["annotations"].as_object().expect("annotations");
            let texts = texts.values().map(|text| text.as_str().unwrap_or_default().to_owned()).collect();
            (name, texts)
        });
        firing.collect()
    }

    /// Polls until `look` succeeds. The error says what is missing.
    ///
    /// # Panics
    /// If `look` does not succeed in time.
    pub(crate) fn until<T>(&self, mut look: impl FnMut() -> Result<T, String>) -> T {
        let until = Instant::now() + PATIENCE;
        loop {
            let missing = match look() {
                Ok(found) => return found,
                Err(missing) => missing,
            };
            let log = || fs::read_to_string(&self.log).unwrap_or_default();
            assert!(Instant::now() < until, "{missing}\n{}", log());
            // Requests without a pause would use up the CPU time of Prometheus.
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Sends a request with a form. Returns the status code and the body. Returns `None` if Prometheus does not answer.
    fn request(&self, line: &str, form: &str) -> Option<(u16, String)> {
        let mut stream = TcpStream::connect(self.address).ok()?;
        let head = format!(
            "{line} HTTP/1.0\r\ncontent-type: application/x-www-form-urlencoded\r\ncontent-length: {}\r\n\r\n{form}",
            form.len()
        );
        stream.write_all(head.as_bytes()).ok()?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).ok()?;
        let answer = parse(&answer)?;
        Some((answer.status, String::from_utf8(answer.body).ok()?))
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a text in the encoding of forms.
fn encoded(text: &str) -> String {
    text.bytes()
        .map(|byte| if byte.is_ascii_alphanumeric() { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}
