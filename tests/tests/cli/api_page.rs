//! Runs the commands of docs/api.md, and checks that each command prints what the page shows.
//!
//! The test runs the `sh` blocks one after the other on a simulated host. If a `json` block follows
//! a command, the output must match this block. Objects of the output may have more members, and
//! `…` matches any text. The blocks below `## MPS` run on another host, on which a GPU is shared
//! through MPS.

use std::{
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use gpush_tests::{
    agent::{Agent, PATIENCE},
    host::Host,
};
use serde_json::Value;

/// Exit code of curl when the time of `--max-time` has passed.
const TIME_IS_OVER: i32 = 28;

/// The config for the part about MPS.
const SHARED: &str = "[[gpu]]\nmatch = [\"4\"]\nmode = \"mps\"\nmps = { percentage = 50 }\n";

/// Returns the fenced blocks, with their languages.
fn blocks(page: &str) -> Vec<(String, String)> {
    let mut blocks: Vec<(String, String)> = Vec::new();
    let mut open = false;
    for line in page.lines() {
        match (line.strip_prefix("```"), open) {
            (Some(language), false) => {
                blocks.push((language.to_owned(), String::new()));
                open = true;
            }
            (Some(_), true) => open = false,
            (None, true) => {
                let text = &mut blocks.last_mut().expect("an open block").1;
                text.push_str(line);
                text.push('\n');
            }
            (None, false) => {}
        }
    }
    blocks
}

/// Returns whether the JSON value `real` matches the value that the page shows.
fn is_like(shown: &Value, real: &Value) -> bool {
    match (shown, real) {
        (Value::String(shown), Value::String(_)) if shown == "…" => true,
        (Value::Object(shown), Value::Object(real)) => {
            shown.iter().all(|(name, value)| real.get(name).is_some_and(|real| is_like(value, real)))
        }
        (Value::Array(shown), Value::Array(real)) => {
            (shown.is_empty() == real.is_empty() && shown.len() <= real.len())
                && std::iter::zip(shown, real).all(|(shown, real)| is_like(shown, real))
        }
        (shown, real) => shown == real,
    }
}

#[test]
fn api_page_commands_print_what_the_page_shows() {
    if !Command::new("curl").arg("--version").stdout(Stdio::null()).status().is_ok_and(|status| status.success()) {
        println!("SKIPPED: curl is not installed");
        return;
    }
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/api.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (page, mps) = page.split_once("\n## MPS\n").expect("a part about MPS");
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    agent.settle_reads();
    let (ran, compared) = run(page, &agent);
    println!("{ran} commands run, {compared} answers compared");
    assert!(ran >= 9 && compared >= 8, "{ran} and {compared}");

    let host = Host::up("mixed");
    let agent = Agent::start(&host, SHARED);
    let started = Instant::now();
    while agent.get("/v1/mps/4").json()["state"] != "ready" {
        assert!(started.elapsed() < PATIENCE, "{}", agent.get("/v1/mps/4").json());
        std::thread::sleep(Duration::from_millis(20));
    }
    let (ran, compared) = run(mps, &agent);
    assert!(ran >= 4 && compared == ran, "{ran} and {compared}");
}

/// Runs the commands of a page or of a part of a page. Returns the number of commands, and the
/// number of compared outputs.
fn run(page: &str, agent: &Agent) -> (usize, usize) {
    let blocks = blocks(page);
    let (mut run, mut compared) = (0, 0);
    for (at, (language, script)) in blocks.iter().enumerate() {
        if language != "sh" {
            continue;
        }
        let script = script.replace("/run/gpush/gpushd.sock", &agent.socket().display().to_string());
        let output = Command::new("sh").args(["-eu", "-c", &script]).stdin(Stdio::null()).output().expect("a shell");
        let ended = output.status.code() == Some(TIME_IS_OVER) && script.contains("--max-time");
        assert!(output.status.success() || ended, "{script}\n{}", String::from_utf8_lossy(&output.stderr));
        run += 1;
        let printed = String::from_utf8_lossy(&output.stdout);
        match blocks.get(at + 1) {
            Some((language, shown)) if language == "json" => {
                let shown: Value = serde_json::from_str(shown).unwrap_or_else(|error| panic!("{error}: {shown}"));
                let real: Value = serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{error}: {printed}"));
                assert!(is_like(&shown, &real), "{script}\nthe page shows {shown}\nit says {real:#}");
                compared += 1;
            }
            _ => assert!(printed.starts_with("id: "), "{script}\n{printed}"),
        }
    }
    (run, compared)
}
