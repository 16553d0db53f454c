//! The text of metric families.

use std::{borrow::Cow, fmt::Write as _};

use crate::Format;

/// Type of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A value that can rise and fall.
    Gauge,
    /// A sum that never falls, except when its source begins again.
    Counter,
}

/// The value of one series.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Names and values of the labels.
    pub labels: Vec<(&'static str, String)>,
    /// Value.
    pub value: f64,
}

/// A metric with all its series.
#[derive(Debug, Clone, PartialEq)]
pub struct Family {
    /// Name, without the suffix `_total` of a counter. If it ends with a unit, OpenMetrics text names the unit.
    pub name: &'static str,
    /// One sentence.
    pub help: &'static str,
    /// Type.
    pub kind: Kind,
    /// The series. A family without series is left out.
    pub samples: Vec<Sample>,
}

impl Family {
    /// Creates a gauge without series.
    #[must_use]
    pub fn gauge(name: &'static str, help: &'static str) -> Self {
        Self { name, help, kind: Kind::Gauge, samples: Vec::new() }
    }

    /// Creates a counter without series. The text adds `_total` to the name.
    #[must_use]
    pub fn counter(name: &'static str, help: &'static str) -> Self {
        Self { name, help, kind: Kind::Counter, samples: Vec::new() }
    }

    /// Adds a series. A value that is absent adds nothing.
    pub fn add<const N: usize>(&mut self, labels: [(&'static str, &str); N], value: impl Into<Option<f64>>) {
        if let Some(value) = value.into() {
            let labels = labels.into_iter().map(|(name, value)| (name, value.to_owned())).collect();
            self.samples.push(Sample { labels, value });
        }
    }
}

/// Units that a name can end with.
const UNITS: [&str; 8] = ["seconds", "bytes", "ratio", "joules", "watts", "celsius", "hertz", "slices"];

/// Writes families as text. Families without series are left out.
#[must_use]
pub fn render(families: &[Family], format: Format) -> String {
    let mut out = String::new();
    for family in families.iter().filter(|family| !family.samples.is_empty()) {
        write_family(&mut out, family, format);
    }
    match format {
        Format::Classic => {}
        Format::OpenMetrics => out.push_str("# EOF\n"),
    }
    out
}

fn write_family(out: &mut String, family: &Family, format: Format) {
    let series: Cow<'_, str> = match family.kind {
        Kind::Gauge => family.name.into(),
        Kind::Counter => format!("{}_total", family.name).into(),
    };
    let name = match format {
        Format::Classic => &*series,
        Format::OpenMetrics => family.name,
    };
    let kind = match family.kind {
        Kind::Gauge => "gauge",
        Kind::Counter => "counter",
    };
    // Writing to a `String` cannot fail.
    let _ = writeln!(out, "# HELP {name} {}", escaped_help(family.help, format));
    let _ = writeln!(out, "# TYPE {name} {kind}");
    let unit = UNITS.iter().find(|unit| name.strip_suffix(**unit).is_some_and(|rest| rest.ends_with('_')));
    if let (Format::OpenMetrics, Some(unit)) = (format, unit) {
        let _ = writeln!(out, "# UNIT {name} {unit}");
    }
    for sample in &family.samples {
        out.push_str(&series);
        for (at, (label, value)) in sample.labels.iter().enumerate() {
            let _ = write!(out, "{}{label}=\"", if at == 0 { '{' } else { ',' });
            escape_label(out, value);
            out.push('"');
        }
        if !sample.labels.is_empty() {
            out.push('}');
        }
        let _ = writeln!(out, " {}", number(sample.value));
    }
}

/// Writes the value of a label. A control character becomes a space: no tool shows it.
fn escape_label(out: &mut String, value: &str) {
    for character in value.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '"' => out.push_str("\\\""),
            '\n' => out.push_str("\\n"),
            character if character.is_control() => out.push(' '),
            character => out.push(character),
        }
    }
}

fn escaped_help(help: &str, format: Format) -> String {
    let escaped = help.replace('\\', "\\\\").replace('\n', "\\n");
    match format {
        Format::Classic => escaped,
        Format::OpenMetrics => escaped.replace('"', "\\\""),
    }
}

fn number(value: f64) -> String {
    if value == f64::INFINITY {
        "+Inf".to_owned()
    } else if value == f64::NEG_INFINITY {
        "-Inf".to_owned()
    } else {
        value.to_string()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn families() -> Vec<Family> {
        let mut energy = Family::counter("gpush_gpu_energy_joules", "Energy of the board.");
        energy.add([("uuid", "GPU-1")], 12.5);
        let mut info = Family::gauge("gpush_lease_info", "Identity of a lease.");
        info.add([("lease", "L1"), ("job", "a\"b\\c\nd")], 1.0);
        let mut queue = Family::gauge("gpush_queue_length", "Requests that wait.");
        queue.add([], 3.0);
        let mut absent = Family::gauge("gpush_absent", "Nothing.");
        absent.add([], None);
        vec![energy, info, queue, absent]
    }

    #[test]
    fn classic_text_has_total_in_the_name_of_a_counter() {
        let expected = "# HELP gpush_gpu_energy_joules_total Energy of the board.\n\
                        # TYPE gpush_gpu_energy_joules_total counter\n\
                        gpush_gpu_energy_joules_total{uuid=\"GPU-1\"} 12.5\n\
                        # HELP gpush_lease_info Identity of a lease.\n\
                        # TYPE gpush_lease_info gauge\n\
                        gpush_lease_info{lease=\"L1\",job=\"a\\\"b\\\\c\\nd\"} 1\n\
                        # HELP gpush_queue_length Requests that wait.\n\
                        # TYPE gpush_queue_length gauge\n\
                        gpush_queue_length 3\n";
        assert_eq!(render(&families(), Format::Classic), expected);
    }

    #[test]
    fn open_metrics_text_has_units_and_an_end() {
        let text = render(&families(), Format::OpenMetrics);
        assert!(text.starts_with(
            "# HELP gpush_gpu_energy_joules Energy of the board.\n# TYPE gpush_gpu_energy_joules counter\n# UNIT \
             gpush_gpu_energy_joules joules\ngpush_gpu_energy_joules_total{uuid=\"GPU-1\"} 12.5\n"
        ));
        assert!(text.ends_with("gpush_queue_length 3\n# EOF\n") && !text.contains("absent"));
        assert_eq!(render(&[], Format::OpenMetrics), "# EOF\n");
    }

    /// Reads the value of a label back, as Prometheus does.
    fn unescaped(text: &str) -> String {
        let mut characters = text.chars();
        let mut value = String::new();
        while let Some(character) = characters.next() {
            value.push(match character {
                '\\' => match characters.next().expect("an escaped character") {
                    'n' => '\n',
                    other => other,
                },
                other => other,
            });
        }
        value
    }

    proptest! {
        /// A user chooses the names of jobs, and must not be able to add series.
        #[test]
        fn label_value_stays_one_value(value in "[\"\\\\\n\r\t{}=, a-zé#]{0,24}") {
            let mut family = Family::gauge("gpush_x", "X.");
            family.add([("job", value.as_str())], 1.0);
            let text = render(&[family], Format::Classic);
            let lines: Vec<&str> = text.lines().collect();
            prop_assert_eq!(lines.len(), 3, "{:?}", text);
            let inner = lines[2].strip_prefix("gpush_x{job=\"").and_then(|rest| rest.strip_suffix("\"} 1")).unwrap();
            let expected = value.replace(['\r', '\t'], " ");
            prop_assert_eq!(unescaped(inner), expected);
            let quotes = inner.replace("\\\\", "").matches('"').count();
            prop_assert_eq!(inner.replace("\\\\", "").matches("\\\"").count(), quotes, "{:?}", inner);
        }

        #[test]
        fn number_is_read_back_exactly(value in proptest::num::f64::ANY) {
            let text = number(value);
            let read: f64 = text.trim_start_matches('+').replace("Inf", "inf").parse().unwrap();
            prop_assert!(read == value || read.is_nan() && value.is_nan(), "{}", text);
        }
    }
}
