//! Random sequences of events. After each event, the sums of each GPU must add up, to the millisecond and millijoule.

use gpush_api::LeaseKind;
use proptest::prelude::*;

use super::*;
use crate::{
    input::{GpuProcess, ProcessOwner, Ratio, Reading, WindowScope},
    samples::{process, sample, window},
    share::Share,
};

/// What the test knows about one GPU.
#[derive(Debug, Default)]
struct Expected {
    elapsed_ms: u64,
    energy_mj: u64,
    counter: u64,
    base: Option<(u64, Moment)>,
}

impl Expected {
    /// Counts a reading of the counter. A step that a board of 700 W cannot need is a new base.
    fn read(&mut self, now: Moment) {
        let step = self.base.and_then(|(base, at)| Some((self.counter.checked_sub(base)?, now.ms_since(at))));
        self.energy_mj += step.filter(|(mj, ms)| *mj <= 1_400 * (ms + 1_000)).map_or(0, |(mj, _)| mj);
        self.base = Some((self.counter, now));
    }
}

#[derive(Debug, Clone)]
enum Event {
    Lease { lease: u64, gpu: usize, eighths: u32, kind: LeaseKind },
    End { lease: u64 },
    Sample { gpu: usize, energy_mj: u64, activity: u32, processes: Vec<u64>, is_failed: bool },
    Gap { gpu: usize },
    Reset { gpu: usize },
    CounterFalls { gpu: usize },
    Unusable { gpu: usize, eighths: u32 },
    Clock { ms: i64 },
    Restart,
    Boot,
    Advance,
}

const GPUS: [&str; 2] = ["GPU-0", "GPU-1"];

fn event() -> impl Strategy<Value = Event> {
    let (gpu, lease) = (0..GPUS.len(), 1..6_u64);
    let kinds = prop::sample::select(&LeaseKind::ALL[..]);
    prop_oneof![
        4 => (lease.clone(), gpu.clone(), 1..=8_u32, kinds)
            .prop_map(|(lease, gpu, eighths, kind)| Event::Lease { lease, gpu, eighths, kind }),
        2 => lease.clone().prop_map(|lease| Event::End { lease }),
        8 => (gpu.clone(), 0..50_000_000_u64, 0..3_u32, prop::collection::vec(0..6_u64, 0..4), any::<bool>()).prop_map(
            |(gpu, energy_mj, activity, processes, is_failed)| Event::Sample { gpu, energy_mj, activity, processes, is_failed }
        ),
        1 => gpu.clone().prop_map(|gpu| Event::Gap { gpu }),
        1 => gpu.clone().prop_map(|gpu| Event::Reset { gpu }),
        1 => gpu.clone().prop_map(|gpu| Event::CounterFalls { gpu }),
        1 => (gpu, 0..=8_u32).prop_map(|(gpu, eighths)| Event::Unusable { gpu, eighths }),
        1 => (-100_000_000..100_000_000_i64).prop_map(|ms| Event::Clock { ms }),
        1 => Just(Event::Restart),
        1 => Just(Event::Boot),
        1 => Just(Event::Advance),
    ]
}

struct Run {
    ledger: Ledger,
    now: Moment,
    gpus: [Expected; 2],
    ended: Vec<LeaseTotals>,
    closed: ClosedRows,
    /// The settled totals of each lease after the last event.
    settled: BTreeMap<LeaseId, LeaseTotals>,
}

impl Run {
    fn new() -> Self {
        let now = Moment { boot: 1, monotonic_ms: 0, wall_ms: 1_700_000_000_000 };
        let mut ledger = Ledger::new();
        for gpu in GPUS {
            ledger.add_gpu(&gpu.into(), now);
        }
        let (ended, closed, settled) = Default::default();
        Self { ledger, now, gpus: Default::default(), ended, closed, settled }
    }

    fn pass(&mut self, ms: u64) {
        self.now = self.now.plus_ms(ms);
        for gpu in &mut self.gpus {
            gpu.elapsed_ms += ms;
        }
    }

    fn apply(&mut self, event: &Event) {
        let now = self.now;
        match event {
            Event::Lease { lease, gpu, eighths, kind } => {
                let units = GPU_UNITS / 8 * eighths;
                let instance = (*kind == LeaseKind::Mig).then_some(*eighths);
                let hold = Hold {
                    gpu: GPUS[*gpu].into(),
                    target: instance.map_or(GPUS[*gpu].into(), |id| format!("MIG-{gpu}-{id}").into()),
                    kind: *kind,
                    share: Share { units, charged: units.max(GPU_UNITS / 7) },
                    instance,
                    memory_mib: 1_000,
                };
                self.ledger.set_lease(LeaseId(*lease), vec![hold], now);
            }
            Event::End { lease } => self.ended.extend(self.ledger.end_lease(LeaseId(*lease), now)),
            Event::Sample { gpu, energy_mj, activity, processes, is_failed } => {
                let expected = &mut self.gpus[*gpu];
                let mut one = GpuSample { gpu: GPUS[*gpu].into(), at: now, ..sample(0) };
                expected.counter += energy_mj;
                one.utilization = Reading::Unsupported;
                one.windows = match activity {
                    0 => Vec::new(),
                    1 => vec![window(WindowScope::Gpu, GPU_UNITS, 0)],
                    _ => vec![
                        window(WindowScope::Instance(1), GPU_UNITS / 8, 400_000),
                        window(WindowScope::Instance(2), GPU_UNITS / 4, 70_000),
                    ],
                };
                one.processes = Reading::Value(
                    processes
                        .iter()
                        .zip(1..)
                        .map(|(lease, pid)| GpuProcess {
                            owner: if *lease == 0 {
                                ProcessOwner::NoLease
                            } else {
                                ProcessOwner::Lease(LeaseId(*lease))
                            },
                            sm: Reading::Value(Ratio::from_millionths(pid * 1000)),
                            ..process(*lease, pid)
                        })
                        .collect(),
                );
                if *is_failed {
                    one.processes = Reading::Failed;
                } else {
                    one.energy_mj = Reading::Value(expected.counter);
                    expected.read(now);
                }
                assert!(self.ledger.sample(&one));
            }
            Event::Gap { gpu } => self.ledger.gap(&GPUS[*gpu].into(), now),
            Event::Reset { gpu } => {
                self.ledger.reset(&GPUS[*gpu].into(), now);
                self.gpus[*gpu].base = None;
            }
            Event::CounterFalls { gpu } => self.gpus[*gpu].counter = 0,
            Event::Unusable { gpu, eighths } => {
                self.ledger.set_unusable(&GPUS[*gpu].into(), GPU_UNITS / 8 * eighths, now);
            }
            Event::Clock { ms } => self.now.wall_ms += ms,
            Event::Restart => {
                let json = serde_json::to_string(&self.ledger).unwrap();
                let restarted: Ledger = serde_json::from_str(&json).unwrap();
                self.ledger = restarted;
                self.ledger.resume(Vec::new(), now);
            }
            Event::Boot => {
                // Between two boots, only the wall clock counts. All GPUs are accounted up to the same time first.
                for gpu in GPUS {
                    self.ledger.gap(&gpu.into(), now);
                }
                self.now.boot += 1;
                self.now.monotonic_ms = 3;
                self.now.wall_ms += 60_000;
                for gpu in &mut self.gpus {
                    gpu.elapsed_ms += 60_000;
                    gpu.base = None;
                }
                self.ledger.resume(Vec::new(), self.now);
            }
            Event::Advance => self.ledger.advance(now),
        }
        let closed = self.ledger.take_closed();
        self.closed.leases.extend(closed.leases);
        self.closed.gpus.extend(closed.gpus);
        self.closed.spans.extend(closed.spans);
    }

    /// Returns the totals of all targets that leases have or had on a GPU.
    fn members(&self, gpu: &str) -> Vec<MemberTotals> {
        let present = self.ledger.leases().filter_map(|lease| self.ledger.totals(lease, self.now));
        let all = present.chain(self.ended.iter().cloned()).flat_map(|totals| totals.members);
        all.filter(|member| member.hold.gpu == *gpu).collect()
    }

    fn check(&self) -> Result<(), TestCaseError> {
        for (figures, (gpu, expected)) in self.ledger.gpus(self.now).zip(GPUS.iter().zip(&self.gpus)) {
            let sums = figures.sums;
            prop_assert_eq!(sums.capacity, u64::from(GPU_UNITS) * sums.known_ms);
            prop_assert_eq!(sums.leased + sums.free + sums.unusable, sums.capacity + sums.excess);
            prop_assert_eq!(sums.charged + sums.uncharged, sums.capacity + sums.overlap);
            let members = self.members(gpu);
            let sum = |value: fn(&HoldSums) -> u64| members.iter().map(|member| value(&member.sums)).sum::<u64>();
            prop_assert_eq!(sum(|sums| sums.unit_ms), sums.leased);
            prop_assert_eq!(sum(|sums| sums.charged_unit_ms), sums.charged);
            prop_assert_eq!(sum(|sums| sums.energy_mj) + sums.unattributed_mj, sums.energy_mj);
            prop_assert_eq!(sums.energy_mj, expected.energy_mj);
            prop_assert!(sums.known_ms <= expected.elapsed_ms);
        }
        Ok(())
    }

    /// Compares the settled totals of all leases with those after the event before. None of them may fall.
    fn check_settled(&mut self) -> Result<(), TestCaseError> {
        let counters = |totals: &LeaseTotals| {
            let (times, sums) = (totals.times, totals.sums());
            let of_lease = [times.busy_ms, times.idle_ms, times.empty_ms, times.unknown_ms];
            let of_targets = [sums.unit_ms, sums.busy_unit_ms, sums.energy_mj, sums.memory.known_ms, sums.sm.known_ms];
            of_lease.into_iter().chain(of_targets)
        };
        let now = self.ledger.leases().filter_map(|lease| Some((lease, self.ledger.settled_totals(lease)?)));
        let now: BTreeMap<LeaseId, LeaseTotals> = now.collect();
        for (lease, totals) in &now {
            let Some(before) = self.settled.get(lease) else { continue };
            for (before, now) in counters(before).zip(counters(totals)) {
                prop_assert!(before <= now, "{} became {}: {:?}", before, now, totals);
            }
        }
        self.settled = now;
        Ok(())
    }
}

/// Every lease is accounted from its start to its end, and the rows contain each millisecond and millijoule once.
fn check_all(mut run: Run) -> Result<(), TestCaseError> {
    for lease in 1..6 {
        run.apply(&Event::End { lease });
    }
    for (gpu, expected) in [(GPUS[0], 0), (GPUS[1], 1)] {
        let sums = run.ledger.remove_gpu(&gpu.into(), run.now).unwrap();
        prop_assert_eq!(sums.known_ms, run.gpus[expected].elapsed_ms);
        run.apply(&Event::Advance);
        let mut rows = GpuSums::default();
        for row in run.closed.gpus.iter().filter(|row| row.gpu == *gpu) {
            rows.merge(&row.sums);
            prop_assert!(row.hour_ms % 3_600_000 == 0);
        }
        prop_assert_eq!(rows, sums);
        let mut all = HoldSums::default();
        for row in run.closed.leases.iter().filter(|row| row.hold.gpu == *gpu) {
            all.merge(&row.sums);
        }
        let mut totals = HoldSums::default();
        for member in run.members(gpu) {
            totals.merge(&member.sums);
        }
        prop_assert_eq!(all, totals);
        prop_assert_eq!(all.unit_ms, sums.leased);
    }
    let numbers = run.closed.leases.iter().map(|row| row.number).chain(run.closed.gpus.iter().map(|row| row.number));
    let unique: BTreeSet<u64> = numbers.collect();
    prop_assert_eq!(unique.len(), run.closed.leases.len() + run.closed.gpus.len());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn sums_of_random_events_add_up_exactly(
        events in prop::collection::vec((event(), 0..100_000_u64), 1..60),
    ) {
        let mut run = Run::new();
        for (event, pass_ms) in &events {
            run.pass(*pass_ms);
            run.apply(event);
            run.check()?;
            run.check_settled()?;
        }
        check_all(run)?;
    }

    /// A lease with one target: its own time equals the time of its target, whatever happens.
    #[test]
    fn time_of_a_lease_equals_the_time_of_its_target(
        events in prop::collection::vec((event(), 0..100_000_u64), 1..60),
    ) {
        let mut run = Run::new();
        for (event, pass_ms) in &events {
            run.pass(*pass_ms);
            // Moves between GPUs settle the GPUs of a lease at different moments.
            match event {
                Event::Lease { lease, eighths, .. } => run.apply(&Event::Lease {
                    lease: *lease,
                    gpu: 0,
                    eighths: *eighths,
                    kind: LeaseKind::Mps,
                }),
                other => run.apply(other),
            }
        }
        for lease in 1..6 {
            run.apply(&Event::End { lease });
        }
        for totals in &run.ended {
            prop_assert_eq!(totals.times, totals.sums().times);
        }
    }
}
