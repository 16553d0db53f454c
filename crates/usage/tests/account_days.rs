//! Days of a host with faults: gpushd is killed, the host boots, the wall clock is set, samples fail, and the energy counter
//! falls. The test keeps its own books, and compares them with the bill: no second is unbilled, none is billed twice.
//!
//! The store is simulated: a transaction writes the closed rows together with the checkpoint. A kill loses everything
//! since the last transaction.

#![allow(clippy::unwrap_used, reason = "a test that meets nothing fails")]

use std::{collections::BTreeMap, env};

use gpush_api::{GpuUuid, LeaseId, LeaseKind};
use gpush_usage::{
    account::{LeaseOwner, fold_gpus, fold_leases},
    bill::{BillModel, BillRows, BilledGpu, ChargeKind, Month, Price, PriceList, bill, bill_csv},
    input::{GpuProcess, GpuSample, Hold, ProcessOwner, Ratio, Reading},
    ledger::{GpuHour, GpuSums, HoldSums, LeaseHour, Ledger},
    moment::Moment,
    share::{GPU_UNITS, Share},
};

const STEP_MS: u64 = 30_000;
const HOUR_MS: u64 = 3_600_000;
const GPUS: [&str; 2] = ["GPU-0", "GPU-1"];

/// What the host keeps on disk.
#[derive(Debug, Default)]
struct Disk {
    leases: Vec<LeaseHour>,
    gpus: Vec<GpuHour>,
    checkpoint: String,
}

/// A host, and what the test knows about it.
struct Host {
    disk: Disk,
    ledger: Ledger,
    now: Moment,
    /// Real time since the start, in ms. It does not depend on any clock of the host.
    real_ms: u64,
    counters: [u64; 2],
    /// Lease, GPU, share, and real time of its begin.
    held: BTreeMap<LeaseId, (usize, u32, u64)>,
    /// Units times ms that each ended lease has held.
    expected: BTreeMap<LeaseId, u64>,
    next: u64,
    restarts: [u64; 3],
}

impl Host {
    fn new() -> Self {
        let start: jiff::Timestamp = "2026-10-25T00:00:00Z".parse().unwrap();
        let now = Moment { boot: 1, monotonic_ms: 0, wall_ms: start.as_millisecond() };
        let mut ledger = Ledger::new();
        for gpu in GPUS {
            ledger.add_gpu(&gpu.into(), now);
        }
        let mut host = Self {
            disk: Disk::default(),
            ledger,
            now,
            real_ms: 0,
            counters: [0; 2],
            held: BTreeMap::new(),
            expected: BTreeMap::new(),
            next: 1,
            restarts: [0; 3],
        };
        host.commit();
        host
    }

    fn commit(&mut self) {
        let closed = self.ledger.take_closed();
        self.disk.leases.extend(closed.leases);
        self.disk.gpus.extend(closed.gpus);
        self.disk.checkpoint = serde_json::to_string(&self.ledger).unwrap();
    }

    fn restart(&mut self) {
        self.ledger = serde_json::from_str(&self.disk.checkpoint).unwrap();
        self.ledger.resume(Vec::new(), self.now);
    }

    fn pass(&mut self, ms: u64) {
        self.now = self.now.plus_ms(ms);
        self.real_ms += ms;
    }

    fn begin(&mut self, random: &mut fastrand::Rng) {
        let gpu = random.usize(0..GPUS.len());
        let taken: u32 = self.held.values().filter(|held| held.0 == gpu).map(|held| held.1).sum();
        let units = GPU_UNITS / 7 * random.u32(1..=3);
        if taken + units > GPU_UNITS {
            return;
        }
        let lease = LeaseId(self.next);
        self.next += 1;
        let hold = Hold {
            gpu: GPUS[gpu].into(),
            target: format!("MIG-{}", lease.0).into(),
            kind: LeaseKind::Mig,
            share: Share { units, charged: units },
            instance: None,
            memory_mib: 1_000,
        };
        self.ledger.set_lease(lease, vec![hold], self.now);
        self.held.insert(lease, (gpu, units, self.real_ms));
        self.commit();
    }

    fn end(&mut self, lease: LeaseId) {
        let (_, units, begun) = self.held.remove(&lease).unwrap();
        self.expected.insert(lease, u64::from(units) * (self.real_ms - begun));
        self.ledger.end_lease(lease, self.now).unwrap();
        self.commit();
    }

    fn sample(&mut self, gpu: usize, random: &mut fastrand::Rng) {
        self.counters[gpu] += random.u64(0..9_000_000);
        let mut processes = Vec::new();
        for (lease, _) in self.held.iter().filter(|(_, held)| held.0 == gpu) {
            if random.bool() {
                processes.push(GpuProcess {
                    pid: u32::try_from(lease.0).unwrap(),
                    start: 1,
                    owner: ProcessOwner::Lease(*lease),
                    instance: None,
                    target: None,
                    memory_mib: Reading::Value(random.u64(0..1_500)),
                    sm: Reading::Value(Ratio::from_millionths(random.u32(0..400_000))),
                });
            }
        }
        let sample = GpuSample {
            gpu: GPUS[gpu].into(),
            at: self.now,
            interval_ms: STEP_MS,
            energy_mj: if random.u8(0..20) == 0 { Reading::Failed } else { Reading::Value(self.counters[gpu]) },
            power_mw: Reading::Unsupported,
            power_limit_mw: Reading::Value(700_000),
            limits: Reading::Unsupported,
            utilization: if random.bool() { Reading::Unsupported } else { Reading::Value(Ratio::ZERO) },
            windows: Vec::new(),
            processes: if random.u8(0..30) == 0 { Reading::Failed } else { Reading::Value(processes) },
        };
        assert!(self.ledger.sample(&sample));
    }

    /// One step, with its faults.
    fn step(&mut self, random: &mut fastrand::Rng) {
        self.pass(STEP_MS + random.u64(0..7));
        match random.u32(0..4_000) {
            0..3 => {
                // kill -9, and a start up to 3 hours later.
                self.pass(random.u64(0..3 * HOUR_MS));
                self.restart();
                self.restarts[0] += 1;
            }
            3 => {
                // A boot: the wall clock is right before and after it, and only it can tell how long the boot took. The
                // daemon stops properly.
                for gpu in GPUS {
                    self.ledger.gap(&gpu.into(), self.now);
                }
                self.commit();
                let ms = random.u64(60_000..HOUR_MS);
                self.pass(ms);
                (self.now.boot, self.now.monotonic_ms) = (self.now.boot + 1, random.u64(0..60_000));
                self.counters = [0; 2];
                self.restart();
                self.restarts[1] += 1;
            }
            4..6 => {
                self.now.wall_ms += random.i64(-7_200_000..7_200_000);
                self.restarts[2] += 1;
            }
            6..20 => self.ledger.gap(&GPUS[random.usize(0..2)].into(), self.now),
            20..25 => {
                let gpu = random.usize(0..2);
                self.counters[gpu] = 0;
                self.ledger.reset(&GPUS[gpu].into(), self.now);
            }
            // A pause of the sampler.
            25..60 => self.pass(random.u64(0..20 * STEP_MS)),
            60..120 => self.begin(random),
            120..160 => {
                let lease = self.held.keys().nth(random.usize(0..self.held.len().max(1))).copied();
                if let Some(lease) = lease {
                    self.end(lease);
                }
            }
            _ => {}
        }
        for gpu in 0..GPUS.len() {
            self.sample(gpu, random);
        }
        if random.u32(0..120) == 0 {
            self.ledger.advance(self.now);
            self.commit();
        }
    }
}

fn setting(name: &str, default: u64) -> u64 {
    env::var(name).map_or(default, |value| value.parse().unwrap())
}

/// `cargo xtask soak` runs 30 days of 20 hosts.
#[test]
fn bills_of_days_with_faults_contain_every_second_once() {
    let days = setting("GPUSH_TEST_ACCOUNT_DAYS", 2);
    let seed = setting("GPUSH_TEST_SEED", 40);
    let mut restarts = [0; 3];
    for number in 0..20 {
        let random = &mut fastrand::Rng::with_seed(seed.wrapping_add(number));
        let mut host = Host::new();
        while host.real_ms < days * 24 * HOUR_MS {
            host.step(random);
        }
        let open: Vec<LeaseId> = host.held.keys().copied().collect();
        for lease in open {
            host.end(lease);
        }
        check(host, &mut restarts);
    }
    println!("seed {seed}: {days} days of 20 hosts; kills, boots and changes of the clock: {restarts:?}");
    assert!(restarts.iter().all(|count| *count > 0), "{restarts:?}");
}

fn check(mut host: Host, restarts: &mut [u64; 3]) {
    let mut totals = BTreeMap::new();
    for gpu in GPUS {
        let sums = host.ledger.remove_gpu(&gpu.into(), host.now).unwrap();
        assert_eq!(sums.known_ms, host.real_ms, "{gpu}: time is missing or counted twice");
        totals.insert(GpuUuid::from(gpu), sums);
    }
    host.commit();
    let mut billed: BTreeMap<LeaseId, HoldSums> = BTreeMap::new();
    for row in &host.disk.leases {
        billed.entry(row.lease).or_default().merge(&row.sums);
    }
    for (lease, expected) in &host.expected {
        assert_eq!(billed[lease].unit_ms, *expected, "{lease}");
    }
    assert_eq!(billed.len(), host.expected.len());
    for (gpu, sums) in &totals {
        let rows = host.disk.gpus.iter().filter(|row| row.gpu == *gpu);
        let mut all = GpuSums::default();
        rows.for_each(|row| all.merge(&row.sums));
        assert_eq!(all, *sums);
        let leases = host.disk.leases.iter().filter(|row| row.hold.gpu == *gpu);
        let (mut unit_ms, mut energy_mj) = (0, 0);
        leases.for_each(|row| {
            unit_ms += row.sums.unit_ms;
            energy_mj += row.sums.energy_mj;
        });
        assert_eq!((unit_ms, energy_mj + sums.unattributed_mj), (sums.leased, sums.energy_mj));
        assert_eq!(unit_ms + sums.free + sums.unusable, sums.capacity + sums.excess);
    }
    check_bills(&host);
    for (sum, count) in restarts.iter_mut().zip(host.restarts) {
        *sum += count;
    }
}

/// The bills of the months contain each row once, and days add up to the hours.
fn check_bills(host: &Host) {
    let owners: BTreeMap<LeaseId, LeaseOwner> = host
        .expected
        .keys()
        .map(|lease| (*lease, LeaseOwner { user: format!("user{}", lease.0 % 3), ..LeaseOwner::default() }))
        .collect();
    let models: BTreeMap<GpuUuid, BilledGpu> =
        GPUS.iter().map(|gpu| ((*gpu).into(), BilledGpu { model: "H100".to_owned(), slices: 7 })).collect();
    let price = Price {
        kind: None,
        model: None,
        per_slice_hour: "0.25".parse().unwrap(),
        per_lease: "1".parse().unwrap(),
        currency: "EUR".to_owned(),
    };
    let prices = PriceList::new(vec![price]).unwrap();
    let (leases, gpus) = (&*host.disk.leases, &*host.disk.gpus);
    let rows =
        BillRows { leases, gpus, owners: &owners, models: &models, adjustments: &[], late_leases: &[], late_gpus: &[] };
    let months: Vec<Month> = ["2026-10", "2026-11"].map(|month| month.parse().unwrap()).into();
    let mut lines = [0; 2];
    let mut charged = 0;
    for month in months {
        let made = bill(month, BillModel::Requested, &prices, rows);
        assert_eq!(bill_csv(&made).unwrap(), bill_csv(&bill(month, BillModel::Requested, &prices, rows)).unwrap());
        for line in &made.lines {
            lines[usize::from(line.charge == ChargeKind::Unallocated)] += 1;
            charged += line.charged_unit_ms;
        }
    }
    assert_eq!(lines, [leases.len(), gpus.iter().filter(|row| row.sums.uncharged > 0).count()]);
    let days = fold_leases(leases, |row| &owners[&row.lease]);
    let gpu_days = fold_gpus(gpus);
    let held: u64 = days.iter().map(|day| day.sums.charged_unit_ms).sum();
    let uncharged: u64 = gpu_days.iter().map(|day| day.sums.uncharged).sum();
    assert_eq!(charged, held + uncharged);
}
