//! `gpush-sim fault`: fault rules from the command line.

use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use silicon::fault::{Code, Kill, Mutation, Rule};
use silicon::{Host, Return};

#[derive(Subcommand)]
pub(crate) enum Action {
    /// Add a rule
    Add(Box<Add>),
    /// List the rules, with how often each matched and fired
    List {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove all rules, or one
    Clear {
        /// Number of the rule in the list; without, all
        number: Option<usize>,
    },
}

#[derive(Args)]
pub(crate) struct Add {
    /// Function, such as nvmlGpuInstanceDestroy (any version of it), or a pattern with `*`; what
    /// goes through nvidia-smi is called gpu-reset, compute-policy-set and compute-policy-list
    function: String,
    /// Only on this GPU
    #[arg(long)]
    gpu: Option<u32>,
    /// Only on this GPU instance
    #[arg(long)]
    gi: Option<u32>,
    /// Only for callers that are not root
    #[arg(long)]
    unprivileged: bool,
    /// Let so many matching calls pass first
    #[arg(long, default_value_t = 0)]
    after: u64,
    /// Fire so often; without, for ever
    #[arg(long)]
    times: Option<u64>,
    /// Fire in this share of the calls, 0 to 1
    #[arg(long)]
    probability: Option<f64>,
    /// Seed of that choice
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Return this code, by name (IN_USE) or number (19)
    #[arg(long)]
    rc: Option<Return>,
    /// SetMigMode succeeds with this activation status and the mode stays pending
    #[arg(long)]
    activation_status: Option<Return>,
    /// Take so much longer
    #[arg(long, default_value_t = 0)]
    delay_ms: u64,
    /// Hang until the rule is removed
    #[arg(long)]
    hang: bool,
    /// Kill the caller before or after the call takes effect
    #[arg(long, value_enum)]
    kill: Option<When>,
    /// Kill its parent first: an agent together with its worker
    #[arg(long, requires = "kill")]
    parent: bool,
    /// lose: the GPU falls off the bus; leak: the caller keeps a handle; stale: the caller sees
    /// the instances as at its nvmlInit
    #[arg(long, value_enum)]
    mutate: Option<What>,
    /// Report this Xid error
    #[arg(long)]
    xid: Option<u64>,
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
            ..Rule::new(&self.function)
        }
    }
}

pub(crate) fn act(host: &Host, action: Action) -> anyhow::Result<ExitCode> {
    match action {
        Action::Add(wanted) => {
            if let Some(gpu) = wanted.gpu {
                crate::process::known_gpu(host, gpu)?;
            }
            host.add_fault(wanted.rule())?;
        }
        Action::List { json } => {
            let rules = host.faults()?;
            if json {
                let row = |(rule, counter): &(Rule, silicon::machine::Counter)| serde_json::json!({"rule": rule, "seen": counter.seen, "fired": counter.fired});
                println!("{}", serde_json::to_string_pretty(&rules.iter().map(row).collect::<Vec<_>>())?);
            } else {
                for (number, (rule, counter)) in rules.iter().enumerate() {
                    println!("{number}: {} [matched {}, fired {}]", words(rule)?, counter.seen, counter.fired);
                }
            }
        }
        Action::Clear { number } => {
            let count = host.clear_faults(number)?;
            println!("{count} removed");
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Formats a rule on one line: its function and its other fields.
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
