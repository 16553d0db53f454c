//! Requests that the API description describes, and a gpushd that gets them.

use std::path::PathBuf;

use gpush_api::MpsState;
use gpush_tests::{
    agent::{Agent, Answer, Setup},
    description::{Parameter, Request, requests},
    host::Host,
    mps::reaches,
};

const CONFIG: &str = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\n
    [[gpu]]\nmatch = [\"1-7\"]\nmode = \"mig\"\nlayout = [\"3g.40gb\", \"2g.20gb\"]\n
    [layouts]\nsmall = [\"1g.10gb*7\"]\n
    [slurm]\nbusy = \"fail\"\n";

/// Returns a valid value for the field or parameter with this name. A text of another name has no valid value that the
/// test knows.
fn sample(name: &str, gpu_uuid: &str) -> String {
    match name {
        "profile" => "2g.20gb",
        "entries" | "layout" => "1g.10gb",
        "selectors" | "selector" | "gpu" | "GPU" => "1",
        "named" => "small",
        "expires_at" | "since" => "2099-01-01T00:00:00Z",
        "wait" => "no",
        "kinds" => "gpu_cordoned",
        "gpu_uuids" | "uuid" => gpu_uuid,
        "id" => "L1",
        // A time in 2100, in milliseconds.
        "until_ms" => "4102444800000",
        _ => "0",
    }
    .to_owned()
}

/// A gpushd whose admin socket gets the requests, because that socket accepts the requests of all callers.
pub(crate) struct Scene {
    agent: Agent,
    admin: PathBuf,
    state: PathBuf,
    host: Host,
}

impl Scene {
    /// Starts gpushd.
    pub(crate) fn new() -> Self {
        let host = Host::up("dgx-a100");
        let setup = Setup::on(&host).config(CONFIG);
        let (admin, state) = (host.scratch("gpushd.admin.sock"), setup.state_dir());
        Self { agent: setup.start(), admin, state, host }
    }

    /// Sends a request.
    pub(crate) fn sent(&self, request: &Request) -> Answer {
        let body = request.body.as_ref().map(ToString::to_string).unwrap_or_default();
        let (target, headers) = (request.target(), request.headers());
        self.agent.request_at(&self.admin, &request.method, &target, &headers, body.as_bytes())
    }

    /// Returns the requests of the description.
    pub(crate) fn requests(&self) -> Vec<Request> {
        reaches(&self.agent, "0", MpsState::Ready);
        let uuid = self.agent.gpu(1).uuid;
        let mut all = requests(&self.agent.get("/v1/openapi.json").json(), &|name| sample(name, uuid.as_str()));
        let is_endless = |request: &&mut Request| {
            request.template == "/v1/events" && request.parameters.iter().all(|parameter| parameter.name != "follow")
        };
        for request in all.iter_mut().filter(is_endless) {
            let (name, place, value) = ("follow".to_owned(), "query".to_owned(), "false".to_owned());
            request.parameters.push(Parameter { name, place, value });
        }
        all
    }

    /// Stops gpushd. Returns its log, its state directory and the host.
    pub(crate) fn stop(self) -> (String, PathBuf, Host) {
        let log = self.agent.log();
        self.agent.stop();
        (log, self.state, self.host)
    }
}
