//! Does to units what its arguments say, one after the other over one connection: for the tests, which
//! run it on a machine with a real systemd, within gpushd's sandbox.
//!
//! `systemd 'start a.service' 'state a.service' 'kill a.service KILL' 'until-failed a.service'
//! 'reset a.service' 'stop a.service' 'sh COMMAND'`

use std::{
    str::FromStr,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;

#[path = "../src/systemd.rs"]
mod systemd;

use systemd::{Manager, Whom};

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let manager = Manager::connect().await?;
    for step in std::env::args().skip(1) {
        let begun = Instant::now();
        let words: Vec<&str> = step.split(' ').collect();
        let told = match words[..] {
            ["start", unit] => manager.start(unit).await.map(|pid| pid.to_string()),
            ["stop", unit] => manager.stop(unit).await.map(|()| "stopped".to_owned()),
            ["state", unit] => manager.state(unit).await.map(|state| format!("{state:?}")),
            ["until-failed", unit] => loop {
                match manager.state(unit).await {
                    Ok(state) if state.active != "failed" => tokio::time::sleep(Duration::from_millis(5)).await,
                    state => break state.map(|state| format!("{state:?}")),
                }
            },
            ["reset", unit] => manager.reset_failed(unit).await.map(|()| "reset".to_owned()),
            ["kill", unit, signal] => {
                let signal = Signal::from_str(&format!("SIG{signal}"))?;
                manager.kill(unit, Whom::Main, signal).await.map(|()| "sent".to_owned())
            }
            ["kill-all", unit, signal] => {
                let signal = Signal::from_str(&format!("SIG{signal}"))?;
                manager.kill(unit, Whom::All, signal).await.map(|()| "sent".to_owned())
            }
            ["sh", ..] => {
                let status = std::process::Command::new("sh").args(["-c", &step[3..]]).status()?;
                Ok(status.to_string())
            }
            _ => anyhow::bail!("no such step: {step}"),
        };
        let told = told.unwrap_or_else(|error| format!("error: {error}"));
        println!("{step}: {told}");
        eprintln!("{step} took {:.1} ms", begun.elapsed().as_secs_f64() * 1000.0);
    }
    Ok(())
}
