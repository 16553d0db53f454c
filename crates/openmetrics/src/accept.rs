//! Chooses the format by the `Accept` header of a request.

/// A text format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// The classic format of Prometheus, version 0.0.4.
    Classic,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

/// Media type of OpenMetrics.
const OPEN_METRICS: &str = "application/openmetrics-text";

impl Format {
    /// Returns the format that a client prefers. A client that accepts both equally, or names neither, gets classic text,
    /// except that a client that only names OpenMetrics gets it.
    #[must_use]
    pub fn accepted(accept: Option<&str>) -> Self {
        let mut best = (Self::Classic, 0);
        for range in accept.unwrap_or_default().split(',') {
            let mut parts = range.split(';').map(str::trim);
            let format = match parts.next().unwrap_or_default() {
                name if name.eq_ignore_ascii_case(OPEN_METRICS) => Self::OpenMetrics,
                "text/plain" | "text/*" | "*/*" => Self::Classic,
                _ => continue,
            };
            let weight = parts.find_map(|part| part.strip_prefix("q=")).map_or(1000, weight);
            if weight > best.1 {
                best = (format, weight);
            }
        }
        best.0
    }

    /// Returns the value of the `Content-Type` header.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Classic => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// Parses a quality value, such as `0.75`, to thousandths. A value that cannot be parsed counts as 0.
fn weight(text: &str) -> u32 {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let thousandths: String = fraction.chars().chain("000".chars()).take(3).collect();
    match (whole, thousandths.parse::<u32>()) {
        ("0", Ok(thousandths)) => thousandths,
        ("1", Ok(_)) => 1000,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accept_header_chooses_the_format() {
        let prometheus = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                          text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        for (accept, format) in [
            (None, Format::Classic),
            (Some(""), Format::Classic),
            (Some("*/*"), Format::Classic),
            (Some("text/plain"), Format::Classic),
            (Some("application/json"), Format::Classic),
            (Some("application/openmetrics-text"), Format::OpenMetrics),
            (Some(prometheus), Format::OpenMetrics),
            (Some("application/openmetrics-text;q=0.3, text/plain;q=0.8"), Format::Classic),
            (Some("application/openmetrics-text;q=0, text/plain;q=0.001"), Format::Classic),
            (Some("text/plain;q=junk, application/openmetrics-text;q=0.1"), Format::OpenMetrics),
        ] {
            assert_eq!(Format::accepted(accept), format, "{accept:?}");
        }
    }
}
