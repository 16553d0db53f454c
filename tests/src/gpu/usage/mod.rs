//! The checks of figures about use (`gpu_use`): how exact they are on a real GPU, and what they cost.
//!
//! ```text
//! clients with a known duty ──► GPU ──► reader ──► duty      error of each signal, alone and under MPS
//!                                │          ├────► readers   the same with a second reader
//!                                │          └────► calls     time of each driver call of a sample
//!                                └────► gpushd ──► energy    energy of two leases
//!                                              figures: errors, parts and times; pure
//! ```
//!
//! The duty of a client is the part of the time in which its kernels run. The client measures it with
//! the clock of the GPU, so it is the truth with which the signals are compared.

mod calls;
mod duty;
mod energy;
mod figures;
mod reader;
mod readers;

use std::time::{Duration, Instant};

use gpush_nvml::driver::Driver;
use nvml_wrapper::Nvml;
use tokio::time::{sleep, timeout};

use self::reader::UseReader;
use super::{
    client::{Client, Work},
    ground::Ground,
    report::{Found, Report},
    service::Service,
};

/// Time after which no check begins, and the present one ends.
const LIMIT: Duration = Duration::from_secs(280);

/// The driver, through gpush's layer and through another one for figures that gpush does not read on
/// every GPU.
#[derive(Debug)]
pub struct Drivers {
    driver: Driver,
    nvml: Nvml,
    uuid: String,
}

impl Drivers {
    /// Opens the driver for the GPU under test.
    ///
    /// # Errors
    /// If the driver cannot be opened.
    pub fn open(ground: &Ground) -> Result<Self, String> {
        let driver = Driver::load(None).map_err(|error| error.to_string())?;
        let library = driver.info().map_err(|error| error.to_string())?.library;
        let nvml = Nvml::builder().lib_path(library.as_ref()).init().map_err(|error| error.to_string())?;
        Ok(Self { driver, nvml, uuid: ground.uuid.clone() })
    }

    fn reader(&self) -> Result<UseReader<'_>, String> {
        UseReader::new(&self.driver, &self.nvml, &self.uuid)
    }
}

/// Runs all checks in order, even if a check fails. `mps` is the reason why MPS cannot be used.
pub async fn all(service: &mut Service, drivers: &Drivers, mps: Result<(), String>, report: &mut Report) {
    let (limit, seconds, ground) = (TimeLimit { began: Instant::now() }, report.seconds, report.gpu.clone());
    report.add("signals", limit.run(duty::alone(service, drivers, seconds)).await);
    report.add("driver calls", limit.run(calls::all(service, drivers)).await);
    report.add("two readers", limit.run(readers::all(service, drivers, &ground, seconds)).await);
    let under_mps = ["signals under MPS", "energy of two clients"];
    let started = match mps {
        Ok(()) => service.start().await.map_err(Err),
        Err(why) => Err(Ok(Found::not_done(&why))),
    };
    match started {
        Ok(()) => {
            report.add(under_mps[0], limit.run(duty::under_mps(service, drivers, seconds)).await);
            report.add(under_mps[1], limit.run(energy::of_two(service, drivers, seconds)).await);
        }
        Err(outcome) => under_mps.into_iter().for_each(|name| report.add(name, outcome.clone())),
    }
}

/// The time limit of all checks together.
#[derive(Debug, Clone, Copy)]
struct TimeLimit {
    began: Instant,
}

impl TimeLimit {
    /// Runs a check while time is left.
    async fn run(self, check: impl Future<Output = Result<Found, String>>) -> Result<Found, String> {
        let left = LIMIT.saturating_sub(self.began.elapsed());
        if left.is_zero() {
            return Ok(Found::not_done("the checks before it needed all the time"));
        }
        timeout(left, check)
            .await
            .unwrap_or_else(|_| Err(format!("not finished {} s after the start", LIMIT.as_secs())))
    }
}

/// Waits until the figures of the driver no longer contain the start of the clients. The driver's figures of processes are
/// means over whole seconds. Short measurements wait for a shorter time.
async fn settle(seconds: f64) {
    const LONGEST: f64 = 2.0;
    sleep(Duration::from_secs_f64(seconds.min(LONGEST))).await;
}

/// Starts a client without MPS that works with a duty, and waits until it works.
async fn working(service: &mut Service, duty: f64) -> Result<(Client, u32), String> {
    let mut client = service.with(None, Work { duty: Some(duty), ..Work::default() })?;
    let pid = client.ready().await?.pid;
    client.computes().await?;
    Ok((client, pid))
}
