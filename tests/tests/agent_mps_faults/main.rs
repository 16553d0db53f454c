//! What goes wrong with MPS daemons, one thing at a time: each is told in `gpushctl mps show`, never leads
//! to a second daemon on a target, and costs no client that need not be lost.

mod hung;
mod places;
mod servers;
mod starts;

use std::path::{Path, PathBuf};

use gpush_api::{Code, MpsDaemon, MpsState};
use gpush_tests::{
    agent::{Agent, Setup},
    host::Host,
    mps::{Client, base, becomes, controls, daemon, is_open, parts, reaches, share},
};
use serde_json::json;

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";
const CONFIG: &str =
    "[mps]\nhealth_s = 1\nstart_s = 2\nstop_s = 2\n[[gpu]]\nname = \"lab\"\nmatch = [\"0\"]\nmode = \"mps\"\n";

/// An agent whose daemon serves, and an environment that is let in.
struct Served {
    // Goes before its host: it would start anew what that ends.
    agent: Agent,
    host: Host,
    environment: Vec<(String, String)>,
    pid: i32,
}

impl Served {
    fn on(host: Host, programs: Option<&Path>) -> Self {
        let setup = Setup::on(&host).config(CONFIG);
        let setup = match programs {
            Some(dir) => setup.env("GPUSH_MPS_PROGRAMS", dir.display().to_string()),
            None => setup,
        };
        let agent = setup.start();
        let ready = reaches(&agent, "0", MpsState::Ready);
        let environment = share(&agent, "0", &json!({})).expect("a share").environment;
        Self { host, agent, environment, pid: pid_of(&ready) }
    }

    fn up() -> Self {
        Self::on(Host::up(HOST), None)
    }

    fn client(&self) -> Client {
        let client = Client::start(&self.host, &self.environment);
        assert!(client.first.starts_with("active"), "{}", client.first);
        becomes(&self.agent, "0", "with its client", |daemon| {
            daemon.clients.iter().any(|one| one.pid.map(u32::cast_signed) == Some(client.pid()))
        });
        client
    }

    fn pipe(&self) -> PathBuf {
        daemon(&self.agent, "0").pipe_directory.expect("a pipe directory").into()
    }

    fn controls(&self) -> Vec<i32> {
        controls(&base(&self.host))
    }

    /// Waits for a state whose reasons have these words, with nobody let in.
    fn is(&self, state: MpsState, words: &str) -> MpsDaemon {
        let told =
            |daemon: &MpsDaemon| daemon.state == state && daemon.reasons.iter().any(|reason| reason.contains(words));
        let daemon = becomes(&self.agent, "0", &format!("{} for {words:?}", state.name()), told);
        assert!(self.controls().len() <= 1, "{:?}", parts(&base(&self.host)));
        let ill = self.agent.get("/v1/health").json()["causes"].to_string();
        assert_eq!(ill.contains("GPU 0 can't be had"), state != MpsState::Ready, "{state:?}: {ill}");
        if state != MpsState::Ready {
            let refused = share(&self.agent, "0", &json!({})).expect_err("nobody is let in");
            assert_eq!(refused.code, Code::Conflict, "{refused:?}");
            assert!(!is_open(Path::new(daemon.pipe_directory.as_deref().expect("a pipe directory"))), "{daemon:#?}");
        }
        daemon
    }

    /// Waits until it serves again, and says whether by the same daemon.
    fn serves(&self) -> bool {
        let ready = reaches(&self.agent, "0", MpsState::Ready);
        assert_eq!(self.controls(), [pid_of(&ready)]);
        pid_of(&ready) == self.pid
    }
}

fn pid_of(daemon: &MpsDaemon) -> i32 {
    daemon.pid.expect("a pid").cast_signed()
}
