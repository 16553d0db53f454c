//! One fault rule: its fields, the calls that it matches, and when it takes effect.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::Call;
use crate::description;
use crate::machine::Counter;
use crate::returns::Return;

/// A return code in a fault rule, as a number or a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(pub Return);

impl From<Code> for Return {
    fn from(code: Code) -> Self {
        code.0
    }
}

impl Serialize for Code {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.name())
    }
}

impl<'de> Deserialize<'de> for Code {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Number(u32),
            Name(String),
        }
        let text = match Written::deserialize(deserializer)? {
            Written::Number(code) => code.to_string(),
            Written::Name(name) => name,
        };
        text.parse().map(Code).map_err(serde::de::Error::custom)
    }
}

/// When a rule kills the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kill {
    /// Kill the caller before the call has any effect.
    Before,
    /// Kill the caller after the call has taken effect.
    After,
}

/// An effect of a rule on the host, or on the state that the caller sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mutation {
    /// The GPU falls off the bus, and stays lost until the next boot.
    Lose,
    /// The caller keeps an open handle of the instance (or GPU) until the caller exits. The driver
    /// does not list the handle. A program that tries to destroy the instance gets `IN_USE`.
    Leak,
    /// The caller sees the instances as they were at its `nvmlInit`.
    Stale,
}

/// How the values of a call are wrong, although the call succeeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sensor {
    /// All values are 0.
    Zero,
    /// All values are NaN.
    Nan,
    /// The list also has processes that do not use the GPU.
    Foreign,
    /// The values are above 100 %.
    Excess,
    /// The timestamps are an hour old, and the caller already has these values.
    Stale,
}

impl Sensor {
    /// Returns the functions whose values can be wrong in this way.
    const fn functions(self) -> &'static [&'static str] {
        match self {
            Self::Zero => &[
                "nvmlDeviceGetUtilizationRates",
                "nvmlDeviceGetTemperature",
                "nvmlDeviceGetPowerUsage",
                "nvmlDeviceGetTotalEnergyConsumption",
                "nvmlDeviceGetFieldValues",
                "nvmlDeviceGetSamples",
                "nvmlDeviceGetProcessUtilization",
                "nvmlGpmMetricsGet",
            ],
            Self::Nan => &["nvmlGpmMetricsGet"],
            Self::Foreign => &["nvmlDeviceGetProcessUtilization"],
            Self::Excess => &[
                "nvmlDeviceGetUtilizationRates",
                "nvmlDeviceGetSamples",
                "nvmlDeviceGetProcessUtilization",
                "nvmlGpmMetricsGet",
            ],
            Self::Stale => &["nvmlDeviceGetFieldValues", "nvmlDeviceGetSamples", "nvmlDeviceGetProcessUtilization"],
        }
    }
}

/// A fault rule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Name of an NVML function, or a pattern with `*`. A name without a version matches all
    /// versions of the function.
    pub function: String,
    /// GPU index. If absent, the rule matches calls for any GPU, and calls that concern no GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<u32>,
    /// GPU instance id. If absent, the rule matches calls for any GPU instance, and calls that
    /// concern no instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_instance: Option<u32>,
    /// Whether the rule matches only callers whose effective uid is not 0.
    #[serde(default, skip_serializing_if = "is_false")]
    pub unprivileged: bool,
    /// Number of matching calls that pass before the rule takes effect.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub after: u64,
    /// Maximum number of times that the rule takes effect. If absent, there is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub times: Option<u64>,
    /// Probability that the rule takes effect in a matching call, after the first `after` calls. If
    /// absent, the rule takes effect in every such call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probability: Option<f64>,
    /// Seed of the random choice for `probability`.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub seed: u64,
    /// The call returns this code, and has no effect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rc: Option<Code>,
    /// `SetMigMode` succeeds with this status, and the mode remains pending.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activation_status: Option<Code>,
    /// Additional duration of the call, in milliseconds.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub delay_ms: u64,
    /// Whether the call hangs until the rule is removed.
    #[serde(default, skip_serializing_if = "is_false")]
    pub hang: bool,
    /// When to kill the caller. If absent, the caller is not killed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kill: Option<Kill>,
    /// Whether to kill the caller's parent first. If the caller is a driver worker, its parent is
    /// gpushd.
    #[serde(default, skip_serializing_if = "is_false")]
    pub parent: bool,
    /// An additional effect on the host or on the caller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mutate: Option<Mutation>,
    /// Number of the Xid error that the driver reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub xid: Option<u64>,
    /// The call succeeds, but its values are wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sensor: Option<Sensor>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for this signature")]
fn is_false(value: &bool) -> bool {
    !value
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for this signature")]
fn is_zero(value: &u64) -> bool {
    *value == 0
}

/// The reason why fault rules cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleError {
    message: String,
    hint: String,
    at: Option<(usize, usize)>,
}

impl RuleError {
    pub(crate) fn new(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { message: message.into(), hint: hint.into(), at: None }
    }
}

impl fmt::Display for RuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "faults.toml: ")?;
        if let Some((line, column)) = self.at {
            write!(f, "line {line}, column {column}: ")?;
        }
        write!(f, "{}", self.message)?;
        if self.hint.is_empty() { Ok(()) } else { write!(f, "; {}", self.hint) }
    }
}

impl std::error::Error for RuleError {}

/// The name of `nvidia-smi --gpu-reset` in fault rules. It is not an NVML call.
pub const GPU_RESET: &str = "gpu-reset";

/// The name of `nvidia-smi compute-policy --set-timeslice` in fault rules. The command counts as
/// one call for each GPU.
pub const COMPUTE_POLICY_SET: &str = "compute-policy-set";

/// The name of `nvidia-smi compute-policy --list` in fault rules.
pub const COMPUTE_POLICY_LIST: &str = "compute-policy-list";

/// All names in fault rules that are not NVML functions.
const COMMANDS: [&str; 3] = [GPU_RESET, COMPUTE_POLICY_SET, COMPUTE_POLICY_LIST];

/// The content of `faults.toml`: all rules, in order.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rules {
    /// Rules.
    #[serde(default)]
    pub fault: Vec<Rule>,
}

impl Rules {
    /// Parses the file.
    ///
    /// # Errors
    /// If the text is invalid. The error names the line, the column and the fix.
    pub fn parse(text: &str) -> Result<Self, RuleError> {
        let read: Self = toml::from_str(text).map_err(|error| {
            let (message, hint, at) = description::explain(text, &error);
            RuleError { message, hint, at }
        })?;
        for (position, rule) in read.fault.iter().enumerate() {
            rule.check().map_err(|error| {
                let headers = text.match_indices("[[fault]]");
                let at = headers.map(|(at, _)| description::place(text, at)).nth(position);
                RuleError { at, ..error }
            })?;
        }
        Ok(read)
    }

    /// Returns the rules as text. If [`Rules::parse`] reads this text, it returns the same rules.
    ///
    /// # Errors
    /// If a rule is invalid.
    pub fn render(&self) -> Result<String, RuleError> {
        for rule in &self.fault {
            rule.check()?;
        }
        if self.fault.is_empty() {
            return Ok(super::EMPTY.to_owned());
        }
        toml::to_string(self).map_err(|error| RuleError::new(format!("cannot be written: {error}"), ""))
    }
}

impl Rule {
    /// Creates a rule for a function. The new rule has no effect until a field sets one.
    #[must_use]
    pub fn new(function: &str) -> Self {
        Self {
            function: function.to_owned(),
            gpu: None,
            gpu_instance: None,
            unprivileged: false,
            after: 0,
            times: None,
            probability: None,
            seed: 0,
            rc: None,
            activation_status: None,
            delay_ms: 0,
            hang: false,
            kill: None,
            parent: false,
            mutate: None,
            xid: None,
            sensor: None,
        }
    }

    /// Sets the return code of the rule.
    #[must_use]
    pub fn rc(self, rc: Return) -> Self {
        Self { rc: Some(Code(rc)), ..self }
    }

    /// Checks whether the rule is valid.
    ///
    /// # Errors
    /// If the rule is invalid. The error names the problem and the fix.
    pub fn check(&self) -> Result<(), RuleError> {
        let name = &self.function;
        let wrong = |message: String, hint: &str| Err(RuleError::new(message, hint));
        let pattern = name.contains('*') && COMMANDS.iter().any(|command| self.matches_name(command));
        let command = COMMANDS.contains(&name.as_str()) || pattern;
        if !name.starts_with("nvml") && !name.starts_with('*') && !command {
            return wrong(
                format!("`function = \"{name}\"` names no function of NVML"),
                "give a name such as nvmlDeviceCreateGpuInstance, or a pattern such as \"nvmlDeviceCreate*\"",
            );
        }
        if self.probability.is_some_and(|share| !(0.0..=1.0).contains(&share)) {
            return wrong("`probability` is a share from 0 to 1".to_owned(), "0.5 is every second call");
        }
        let does = self.rc.is_some()
            || self.activation_status.is_some()
            || self.delay_ms > 0
            || self.hang
            || self.kill.is_some()
            || self.mutate.is_some()
            || self.xid.is_some()
            || self.sensor.is_some();
        if !does {
            return wrong(
                format!("the rule for {name} does nothing"),
                "give one of rc, delay_ms, hang, kill, mutate, xid, sensor, activation_status",
            );
        }
        if self.parent && self.kill.is_none() {
            return wrong(
                format!("the rule for {name} does nothing to the caller's parent"),
                "`parent` goes with `kill`",
            );
        }
        if let Some(sensor) = self.sensor
            && !sensor.functions().iter().any(|function| self.matches_name(function))
        {
            return wrong(
                format!("{name} has no values that can be wrong in this way"),
                &format!("`sensor` of this kind goes with {}", sensor.functions().join(", ")),
            );
        }
        if self.activation_status.is_some() && !self.matches_name("nvmlDeviceSetMigMode") {
            return wrong(
                format!("{name} has no activation status"),
                "`activation_status` goes with function = \"nvmlDeviceSetMigMode\"",
            );
        }
        Ok(())
    }

    /// Returns whether the rule matches the name of a function. The rule's name may be the exact
    /// name, the name without its version, or a pattern.
    #[must_use]
    pub fn matches_name(&self, function: &str) -> bool {
        if self.function.contains('*') {
            return glob(self.function.as_bytes(), function.as_bytes());
        }
        let version = function.strip_prefix(self.function.as_str());
        version.is_some_and(|rest| {
            rest.is_empty() || rest.strip_prefix("_v").is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()))
        })
    }

    /// Returns whether the rule matches a call.
    #[must_use]
    pub fn matches(&self, call: &Call<'_>, root: bool) -> bool {
        self.matches_name(call.function)
            && (self.gpu.is_none() || self.gpu == call.gpu)
            && (self.gpu_instance.is_none() || self.gpu_instance == call.gpu_instance)
            && !(self.unprivileged && root)
    }

    /// Returns whether the rule takes effect in this call. `counter.seen` already includes this
    /// call, but `counter.fired` does not.
    pub(super) fn fires(&self, counter: Counter, fingerprint: u64) -> bool {
        if counter.seen <= self.after || self.times.is_some_and(|times| counter.fired >= times) {
            return false;
        }
        let Some(share) = self.probability else { return true };
        let mixed = (self.seed ^ fingerprint).wrapping_add(counter.seen.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mixed = (mixed ^ mixed >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed >> 11) as f64 / (1u64 << 53) as f64) < share
    }
}

/// Returns the rules, each with a fingerprint that identifies it in the shared state. The
/// fingerprint depends on the text of the rule, and on the number of equal rules before it.
pub(crate) fn numbered(rules: Vec<Rule>) -> Vec<(u64, Rule)> {
    let mut texts: Vec<String> = Vec::with_capacity(rules.len());
    let number = |rule: Rule| {
        let text = toml::to_string(&rule).unwrap_or_default();
        let equal = texts.iter().filter(|other| **other == text).count();
        let own = crate::fingerprint::of(&format!("{equal}\n{text}"));
        texts.push(text);
        (own, rule)
    };
    rules.into_iter().map(number).collect()
}

/// Returns whether a text matches a pattern in which `*` matches any text.
fn glob(pattern: &[u8], text: &[u8]) -> bool {
    match pattern.split_first() {
        None => text.is_empty(),
        Some((b'*', rest)) => (0..=text.len()).any(|skip| glob(rest, &text[skip..])),
        Some((first, rest)) => text.first() == Some(first) && glob(rest, &text[1..]),
    }
}
