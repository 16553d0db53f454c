//! Leases of Slurm jobs: what gpushd answers to Prolog and to Epilog. The tests send the requests of the hooks.
//!
//! | file | subject |
//! |---|---|
//! | `busy` | jobs that wait for capacity |
//! | `accounts` | names and accounts of jobs |
//! | `grants` | which devices a job gets |
//! | `runs` | runs of a job, components of a heterogeneous job, restarts of gpushd |
//! | `refusals` | jobs that gpushd refuses, and requests of users |
//! | `node_states` | GPUs and databases that do not work |
//! | `idle_jobs` | jobs whose leases are unused |
//! | `leftovers` | processes that still run after the end of their job |

mod accounts;
mod busy;
mod grants;
mod idle_jobs;
mod leftovers;
mod node_states;
mod refusals;
mod runs;

use gpush_api::{
    ApiError, Code, Lease, LeaseBinding, LeaseGrant, LeaseState, SlurmDevice, SlurmJobEnd, SlurmJobEnded,
    SlurmJobStart, SlurmJobStarted, SlurmOutcome, TargetUuid,
};
use gpush_core::lease::request::parse;
use gpush_host::peer::Peer;
use hyper::{Method, StatusCode};
use serde::{Serialize, de::DeserializeOwned};

use super::{InProcess, PATIENCE, lease_requests::whole_gpus, requests::request, user};
use crate::serve::http::admin_socket::ThroughAdminSocket;

/// A config in which only jobs use the GPUs, as whole GPUs.
const WHOLE: &str = "[slurm]\nbusy = \"fail\"\n[[gpu]]\nmatch = [\"all\"]\nmode = \"exclusive\"\nowner = \"slurm\"\n";

/// A config in which only jobs use the GPUs, as MIG devices.
const MIG: &str = "[slurm]\nbusy = \"fail\"\n[[gpu]]\nmatch = [\"all\"]\nmode = \"mig\"\nlayout = [\"1g.10gb*3\"]\nowner = \"slurm\"\n";

/// The user of the jobs.
const ALICE: u32 = 1000;

/// Another user.
const BOB: u32 = 1001;

/// A job, as its hooks describe it to gpushd.
#[derive(Debug, Clone)]
struct Job(SlurmJobStart);

impl Job {
    /// Creates a job of ALICE without devices and without a request.
    fn new(job: u32) -> Self {
        let (cluster, node) = ("ci".to_owned(), "n1".to_owned());
        let until_ms = i64::MAX;
        Self(SlurmJobStart {
            cluster,
            job,
            node,
            uid: ALICE,
            restart: 0,
            leader: None,
            name: Some(format!("train-{job}")),
            account: Some("physics".to_owned()),
            request: None,
            devices: Vec::new(),
            until_ms,
        })
    }

    /// Adds the whole GPUs with these minor numbers.
    fn on(self, minors: &[u32]) -> Self {
        self.with(minors.iter().map(|minor| SlurmDevice::Minor(*minor)))
    }

    /// Adds the device with this UUID.
    fn on_uuid(self, uuid: &str) -> Self {
        self.with([SlurmDevice::Uuid(uuid.to_owned())])
    }

    fn with(mut self, devices: impl IntoIterator<Item = SlurmDevice>) -> Self {
        self.0.devices.extend(devices);
        self
    }

    /// Sets the request of the job, such as `mps=25`.
    fn requests(mut self, spec: &str) -> Self {
        self.0.request = Some(parse(spec).expect("a request"));
        self
    }

    fn of(mut self, uid: u32) -> Self {
        self.0.uid = uid;
        self
    }

    /// Sets the restart count.
    fn run(mut self, restart: u32) -> Self {
        self.0.restart = restart;
        self
    }

    /// Sets the deadline of the hooks, in milliseconds from now.
    fn for_ms(mut self, time: i64) -> Self {
        self.0.until_ms = jiff::Timestamp::now().as_millisecond() + time;
        self
    }

    fn end(&self) -> SlurmJobEnd {
        SlurmJobEnd {
            cluster: self.0.cluster.clone(),
            job: self.0.job,
            node: self.0.node.clone(),
            restart: self.0.restart,
            until_ms: self.0.until_ms,
        }
    }
}

/// Starts gpushd on a host with two GPUs without MIG.
async fn two_gpus(config: &str) -> InProcess {
    whole_gpus(2).start(config).await
}

/// Starts gpushd on a host with one GPU that has three MIG devices for jobs. Returns the UUIDs of the devices.
async fn mig_devices() -> (InProcess, Vec<TargetUuid>) {
    let host = InProcess::start("dgx-h100", 1, MIG).await;
    host.apply(&["0"], &["1g.10gb*3"]).await;
    let uuids = host.device_uuids(0).await;
    assert_eq!(uuids.len(), 3);
    (host, uuids)
}

impl InProcess {
    /// Returns the UUIDs of the MIG devices of a GPU.
    async fn device_uuids(&self, gpu: u32) -> Vec<TargetUuid> {
        let instances = self.gpu(gpu).await.mig.expect("a GPU with MIG").instances;
        instances.iter().flat_map(|instance| &instance.compute).filter_map(|device| device.uuid.clone()).collect()
    }

    /// Sends a request of a hook through the admin socket.
    async fn hook<T: DeserializeOwned>(&self, peer: Peer, path: &str, body: &impl Serialize) -> Result<T, ApiError> {
        let body = serde_json::to_vec(body).expect("JSON");
        let mut request = request(peer, Method::POST, path, &[("content-type", "application/json")], body);
        request.extensions_mut().insert(ThroughAdminSocket);
        let answer = tokio::time::timeout(PATIENCE, self.begin_request(request)).await.expect("gpushd answers in time");
        let answer = answer.expect("an answer");
        assert!(answer.status == StatusCode::OK || answer.status.as_u16() >= 400, "{answer:?}");
        answer.document()
    }

    /// Sends the request of Prolog. An error means that the node cannot serve the job.
    async fn prolog(&self, job: &Job) -> Result<SlurmJobStarted, ApiError> {
        self.hook(user(0), "/v1/slurm/jobs", &job.0).await
    }

    /// Begins a job, which must get a lease.
    async fn starts(&self, job: &Job) -> LeaseGrant {
        match self.prolog(job).await.expect("the node can serve the job").outcome {
            SlurmOutcome::Granted { grant } => *grant,
            other => panic!("{other:?}"),
        }
    }

    /// Begins a job that gpushd must refuse. Returns the reasons and the hint, in one line.
    async fn refuses(&self, job: &Job) -> String {
        match self.prolog(job).await.expect("the node can serve jobs").outcome {
            SlurmOutcome::Refused { reasons, hint } => format!("{}; {}", reasons.join("; "), hint.unwrap_or_default()),
            other => panic!("{other:?}"),
        }
    }

    /// Begins a job that the node cannot serve. Returns the error.
    async fn fails(&self, job: &Job) -> ApiError {
        self.prolog(job).await.expect_err("the node cannot serve the job")
    }

    /// Sends the request of Epilog.
    async fn epilog(&self, job: &Job) -> SlurmJobEnded {
        self.hook(user(0), "/v1/slurm/jobs/end", &job.end()).await.expect("gpushd records the end")
    }

    /// Returns the lease of a job, or `None` if it has ended.
    async fn lease_of_job(&self, id: u32) -> Option<Lease> {
        let all = self.leases().await;
        all.into_iter().find(|lease| matches!(lease.binding, LeaseBinding::Job { job, .. } if job == id))
    }

    /// Returns the state of a lease.
    async fn state_of(&self, lease: &LeaseGrant) -> LeaseState {
        self.get::<Lease>(&format!("/v1/leases/{}", lease.lease.id)).await.state
    }
}

/// Returns the UUIDs of the devices of a lease, sorted.
fn targets(lease: &LeaseGrant) -> Vec<TargetUuid> {
    let mut targets: Vec<TargetUuid> = lease.lease.members.iter().map(|member| member.target.clone()).collect();
    targets.sort_unstable();
    targets
}

/// A hook that gives up before gpushd reads its request gets no lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_after_the_deadline_gets_no_lease() {
    let host = two_gpus(WHOLE).await;
    let late = host.fails(&Job::new(1).on(&[0]).for_ms(-1)).await;
    assert_eq!(late.code, Code::TimedOut, "{late:?}");
    assert_eq!(host.leases().await, []);
    host.starts(&Job::new(1).on(&[0]).for_ms(600_000)).await;
}
