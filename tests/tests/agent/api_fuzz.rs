//! Compares the API with its description. schemathesis generates valid and invalid requests from
//! `/v1/openapi.json`, and checks each response.

use std::{
    io::copy,
    net::{Shutdown, TcpListener, TcpStream},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::Command,
};

use gpush_api::MpsState;
use gpush_tests::{agent::Agent, host::Host, mps::reaches};

/// Minimum number of requests for each operation of the API. All operations together get more than
/// 2,000 requests.
const EXAMPLES: usize = 70;

/// Minimum total number of requests.
const CASES: u64 = 2000;

/// A config with the objects that the examples of the API description name: GPU 0 and its MPS
/// target.
const CONFIG: &str = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\n
    [[gpu]]\nmatch = [\"1\"]\nmode = \"mig\"\nlayout = [\"3g.40gb\", \"2g.20gb\"]\n";

/// Returns the path of schemathesis. If schemathesis is not installed, prints a message and returns
/// `None`.
fn schemathesis() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the workspace");
    let venv = std::env::var_os("GPUSH_TEST_VENV").map_or_else(|| root.join("target/venv"), PathBuf::from);
    let program = venv.join("bin/schemathesis");
    if !program.exists() {
        println!("SKIPPED schemathesis: not installed in {}", venv.display());
        return None;
    }
    Some(program)
}

/// Forwards TCP connections to a Unix socket, because schemathesis uses HTTP only over TCP.
fn forward(socket: PathBuf) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let Ok(agent) = UnixStream::connect(&socket) else { continue };
            let (from, to) = (client.try_clone().expect("a stream"), agent.try_clone().expect("a stream"));
            std::thread::spawn(move || pump_up(from, to));
            std::thread::spawn(move || pump_down(agent, client));
        }
    });
    format!("http://{address}")
}

fn pump_up(mut from: TcpStream, mut to: UnixStream) {
    let _ = copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Write);
}

fn pump_down(mut from: UnixStream, mut to: TcpStream) {
    let _ = copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Both);
}

#[test]
fn two_thousand_generated_requests_match_the_description() {
    let Some(program) = schemathesis() else { return };
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, CONFIG);
    reaches(&agent, "0", MpsState::Ready);
    let url = forward(agent.socket().to_owned());
    let output = Command::new(program)
        .arg("run")
        .arg(format!("{url}/v1/openapi.json"))
        .args(["--url", &url, "--seed", "20261122", "--max-examples", &EXAMPLES.to_string()])
        .args(["--checks", "all", "--phases", "examples,coverage,fuzzing", "--no-color"])
        // The schema permits any string as the name of a GPU or a layout, but gpushd refuses the
        // name of an object that does not exist. So leave out the check that gpushd accepts all
        // valid data.
        .args(["--exclude-checks", "positive_data_acceptance"])
        // Leave out this path, because its response never ends.
        .args(["--exclude-path", "/v1/events"])
        .args(["--request-timeout", "30", "--generation-database", "none"])
        .current_dir(host.scratch("."))
        .output()
        .expect("schemathesis can be started");
    let text = String::from_utf8_lossy(&output.stdout);
    let summary = text.find("SUMMARY").map_or(&*text, |at| &text[at..]);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    println!("{summary}");
    let generated = summary.split_whitespace().zip(summary.split_whitespace().skip(1));
    let cases = generated
        .filter(|(_, word)| word.trim_end_matches(',') == "generated")
        .filter_map(|(number, _)| number.parse().ok())
        .max();
    assert!(cases >= Some(CASES), "{cases:?} cases: {summary}");
}
