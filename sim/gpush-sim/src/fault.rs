//! `gpush-sim fault`: adds, lists and removes fault rules.

use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use mps_sim::outln;
use silicon::fault::{Code, Kill, Mutation, Rule, Sensor};
use silicon::{Host, Return};

#[derive(Subcommand)]
pub(crate) enum Action {
    /// Add a rule
    Add(Box<Add>),
    /// List the rules, with the number of times that each matched and fired
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove rules
    Clear {
        /// Number of the rule in the list [default: all]
        number: Option<usize>,
    },
}

#[derive(Args)]
pub(crate) struct Add {
    /// NVML function, in any version, such as nvmlGpuInstanceDestroy, or a pattern with `*`; calls
    /// of nvidia-smi are named gpu-reset, compute-policy-set and compute-policy-list
    function: String,
    /// Only calls for this GPU, by index [default: all]
    #[arg(long)]
    gpu: Option<u32>,
    /// Only calls for this GPU instance, by id [default: all]
    #[arg(long)]
    gi: Option<u32>,
    /// Only calls of programs that do not run as root
    #[arg(long)]
    unprivileged: bool,
    /// Number of matching calls before the rule fires
    #[arg(long, default_value_t = 0)]
    after: u64,
    /// Number of times that the rule fires [default: no limit]
    #[arg(long)]
    times: Option<u64>,
    /// Probability that the rule fires at a matching call, 0 to 1 [default: 1]
    #[arg(long)]
    probability: Option<f64>,
    /// Seed of the random numbers for --probability
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// NVML return code, by name (IN_USE) or number (19)
    #[arg(long)]
    rc: Option<Return>,
    /// Activation status with which SetMigMode succeeds, while the mode stays pending
    #[arg(long)]
    activation_status: Option<Return>,
    /// Delay of the call, in milliseconds
    #[arg(long, default_value_t = 0)]
    delay_ms: u64,
    /// Let the call hang until the rule is removed
    #[arg(long)]
    hang: bool,
    /// Kill the caller before or after the call takes effect
    #[arg(long, value_enum)]
    kill: Option<When>,
    /// Kill the caller's parent first: an agent together with its worker
    #[arg(long, requires = "kill")]
    parent: bool,
    /// lose: the GPU falls off the bus; leak: the caller keeps a handle; stale: the caller sees the
    /// instances that existed at its nvmlInit
    #[arg(long, value_enum)]
    mutate: Option<What>,
    /// Xid error to report
    #[arg(long)]
    xid: Option<u64>,
    /// Let the call succeed with wrong values. zero: all are 0; nan: all are NaN; foreign: other
    /// processes are listed too; excess: above 100 %; stale: an hour old
    #[arg(long, value_enum)]
    sensor: Option<Lie>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Lie {
    Zero,
    Nan,
    Foreign,
    Excess,
    Stale,
}

#[derive(Clone, Copy, ValueEnum)]
enum When {
    Before,
    After,
}

#[derive(Clone, Copy, ValueEnum)]
enum What {
    Lose,
    Leak,
    Stale,
}

impl Add {
    fn rule(&self) -> Rule {
        Rule {
            gpu: self.gpu,
            gpu_instance: self.gi,
            unprivileged: self.unprivileged,
            after: self.after,
            times: self.times,
            probability: self.probability,
            seed: self.seed,
            rc: self.rc.map(Code),
            activation_status: self.activation_status.map(Code),
            delay_ms: self.delay_ms,
            hang: self.hang,
            kill: self.kill.map(|when| match when {
                When::Before => Kill::Before,
                When::After => Kill::After,
            }),
            parent: self.parent,
            mutate: self.mutate.map(|what| match what {
                What::Lose => Mutation::Lose,
                What::Leak => Mutation::Leak,
                What::Stale => Mutation::Stale,
            }),
            xid: self.xid,
            sensor: self.sensor.map(|lie| match lie {
                Lie::Zero => Sensor::Zero,
                Lie::Nan => Sensor::Nan,
                Lie::Foreign => Sensor::Foreign,
                Lie::Excess => Sensor::Excess,
                Lie::Stale => Sensor::Stale,
            }),
            ..Rule::new(&self.function)
        }
    }
}

pub(crate) fn act(host: &Host, action: Action) -> anyhow::Result<ExitCode> {
    match action {
        Action::Add(wanted) => {
            if let Some(gpu) = wanted.gpu {
                crate::gpus::known_gpu(host, gpu)?;
            }
            host.add_fault(wanted.rule())?;
        }
        Action::List { json } => {
            let rules = host.faults()?;
            if json {
                let row = |(rule, counter): &(Rule, silicon::machine::Counter)| serde_json::json!({"rule": rule, "seen": counter.seen, "fired": counter.fired});
                outln!("{}", serde_json::to_string_pretty(&rules.iter().map(row).collect::<Vec<_>>())?);
            } else {
                for (number, (rule, counter)) in rules.iter().enumerate() {
                    outln!("{number}: {} [matched {}, fired {}]", words(rule)?, counter.seen, counter.fired);
                }
            }
        }
        Action::Clear { number } => {
            let count = host.clear_faults(number)?;
            outln!("{count} removed");
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Formats a rule on one line: the function, then the other fields.
fn words(rule: &Rule) -> anyhow::Result<String> {
    let mut words = vec![rule.function.clone()];
    if let serde_json::Value::Object(fields) = serde_json::to_value(rule)? {
        let others = fields.iter().filter(|(name, _)| *name != "function");
        words.extend(others.map(|(name, value)| match value {
            serde_json::Value::String(text) => format!("{name}={text}"),
            value => format!("{name}={value}"),
        }));
    }
    Ok(words.join(" "))
}
