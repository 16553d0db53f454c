//! Utilization, temperature, power and ECC errors of a GPU, for `status -o wide` and `gpu show`.

use gpush_api::Sensors;

/// Text for a value that the driver does not report.
const ABSENT: &str = "-";

fn value(value: Option<u32>) -> String {
    value.map_or_else(|| ABSENT.to_owned(), |value| value.to_string())
}

/// Formats milliwatts as whole watts.
fn watts(milliwatts: Option<u32>) -> String {
    value(milliwatts.map(|milliwatts| (milliwatts + 500) / 1000))
}

/// Formats the numbers of ECC errors since the driver was loaded: corrected and uncorrected ones.
fn ecc(sensors: &Sensors) -> String {
    match (sensors.ecc_corrected, sensors.ecc_uncorrected) {
        (None, None) => ABSENT.to_owned(),
        (corrected, uncorrected) => {
            let count = |count: Option<u64>| count.map_or_else(|| ABSENT.to_owned(), |count| count.to_string());
            format!("{}/{}", count(corrected), count(uncorrected))
        }
    }
}

/// Returns the cells of the columns UTIL, TEMP, POWER and ECC.
pub(crate) fn cells(sensors: &Sensors) -> [String; 4] {
    let with_unit = |text: String, unit: &str| if text == ABSENT { text } else { text + unit };
    let power = match (sensors.power_mw, sensors.power_limit_mw) {
        (None, None) => ABSENT.to_owned(),
        (power, limit) => format!("{}/{}W", watts(power), watts(limit)),
    };
    [
        with_unit(value(sensors.utilization_percent), "%"),
        with_unit(value(sensors.temperature_c), "C"),
        power,
        ecc(sensors),
    ]
}

/// Draws the line with sensors below the heading of a GPU. When values change, the columns stay in their places.
pub(crate) fn line(sensors: &Sensors) -> String {
    format!(
        "util {:>3}%  mem {:>3}%  {:>3} C  {:>4}/{} W  ECC {}",
        value(sensors.utilization_percent),
        value(sensors.memory_utilization_percent),
        value(sensors.temperature_c),
        watts(sensors.power_mw),
        watts(sensors.power_limit_mw),
        ecc(sensors),
    )
}

/// Returns the values that the driver reports, each with its name, for `gpu show`.
pub(crate) fn facts(sensors: &Sensors) -> Vec<(&'static str, String)> {
    let mut facts = Vec::new();
    if let Some(percent) = sensors.utilization_percent {
        facts.push(("utilization", format!("{percent}%, memory {}%", value(sensors.memory_utilization_percent))));
    }
    if let Some(celsius) = sensors.temperature_c {
        facts.push(("temperature", format!("{celsius} C")));
    }
    if sensors.power_mw.is_some() {
        facts.push(("power", format!("{} of {} W", watts(sensors.power_mw), watts(sensors.power_limit_mw))));
    }
    if let (Some(corrected), Some(uncorrected)) = (sensors.ecc_corrected, sensors.ecc_uncorrected) {
        facts.push(("ECC errors", format!("{corrected} corrected, {uncorrected} uncorrected")));
    }
    facts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_that_the_driver_does_not_report_is_a_dash() {
        let sensors = Sensors {
            utilization_percent: Some(97),
            memory_utilization_percent: Some(41),
            temperature_c: Some(61),
            power_mw: Some(312_600),
            power_limit_mw: Some(400_000),
            ecc_corrected: Some(3),
            ecc_uncorrected: Some(0),
        };
        assert_eq!(line(&sensors), "util  97%  mem  41%   61 C   313/400 W  ECC 3/0");
        // The driver reports no utilization of a GPU in MIG mode.
        let in_mig = Sensors { utilization_percent: None, memory_utilization_percent: None, ..sensors };
        assert_eq!(line(&in_mig), "util   -%  mem   -%   61 C   313/400 W  ECC 3/0");
        assert_eq!(line(&Sensors::default()), "util   -%  mem   -%    - C     -/- W  ECC -");
        assert_eq!(cells(&sensors), ["97%", "61C", "313/400W", "3/0"]);
        assert_eq!(cells(&Sensors::default()), ["-"; 4]);
        assert_eq!(facts(&sensors).len(), 4);
        assert_eq!(facts(&in_mig).len(), 3);
        assert_eq!(facts(&Sensors::default()), []);
    }
}
