//! `[[price]]`: what a share of a GPU costs. The bills of `crates/usage` use the prices.

use std::{fmt, ops::Range};

use gpush_api::LeaseKind;
use toml::de::{DeTable, DeValue};

use super::{
    reader::{Reader, Text, get, key_span},
    schema::PRICE,
    toml_text::text,
};
use crate::{diagnostic::Problem, quote::Quoted};

/// Number of decimals of a price.
const DECIMALS: usize = 6;

/// Highest price, in whole units of the currency.
const HIGHEST: u64 = 1_000_000;

/// A price in millionths of a currency unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct PriceAmount(u64);

impl PriceAmount {
    /// Returns the millionths.
    #[must_use]
    pub fn millionths(self) -> u64 {
        self.0
    }

    /// Parses a decimal number such as `0.25`. Returns `None` if the number is negative or too high, or has more than six
    /// decimals.
    fn parse(text: &str) -> Option<Self> {
        let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
        let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        let fraction = if fraction.len() > DECIMALS { fraction.trim_end_matches('0') } else { fraction };
        if !is_number(whole) || fraction.len() > DECIMALS || !(fraction.is_empty() || is_number(fraction)) {
            return None;
        }
        let millionths: u64 = format!("{whole}{fraction:0<DECIMALS$}").parse().ok()?;
        (millionths <= HIGHEST * 1_000_000).then_some(Self(millionths))
    }
}

impl fmt::Display for PriceAmount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fraction = format!("{:06}", self.0 % 1_000_000);
        match fraction.trim_end_matches('0') {
            "" => write!(f, "{}", self.0 / 1_000_000),
            fraction => write!(f, "{}.{fraction}", self.0 / 1_000_000),
        }
    }
}

/// A `[[price]]` table. The first price that fits a lease applies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PriceRule {
    /// Kind of the leases; `None` for all.
    pub kind: Option<LeaseKind>,
    /// GPU model, with or without `NVIDIA`, in any case; `None` for all.
    pub model: Option<String>,
    /// Price of a slice for an hour. A GPU without MIG has one slice.
    pub per_slice_hour: PriceAmount,
    /// Price of a lease for a calendar month, whatever its length. Only bills of the model `flat` use it.
    pub per_lease: PriceAmount,
    /// Currency: three capital letters.
    pub currency: String,
}

/// Returns whether the name of a model in the config means a GPU's model: with or without `NVIDIA`, in any case.
#[must_use]
pub fn names_model(name: &str, model: &str) -> bool {
    const VENDOR: &str = "NVIDIA ";
    let without_vendor = |text: &str| match text.get(..VENDOR.len()) {
        Some(start) if start.eq_ignore_ascii_case(VENDOR) => text[VENDOR.len()..].to_ascii_lowercase(),
        Some(_) | None => text.to_ascii_lowercase(),
    };
    without_vendor(name) == without_vendor(model)
}

impl PriceRule {
    /// Returns whether every lease that `later` fits also fits this price. Then `later` never applies.
    fn covers(&self, later: &Self) -> bool {
        let same_model = |model: &String| later.model.as_ref().is_some_and(|one| names_model(model, one));
        (self.kind.is_none() || self.kind == later.kind) && self.model.as_ref().is_none_or(same_model)
    }

    /// Returns the keys of the table, with their values as TOML.
    pub(super) fn written(&self) -> Vec<(&'static str, String)> {
        let amount = |amount: PriceAmount| (amount != PriceAmount::default()).then(|| amount.to_string());
        let all = [
            ("kind", self.kind.map(|kind| text(kind.name()))),
            ("model", self.model.as_deref().map(text)),
            ("per_slice_hour", Some(self.per_slice_hour.to_string())),
            ("per_lease", amount(self.per_lease)),
            ("currency", Some(text(&self.currency))),
        ];
        all.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
    }
}

pub(super) fn read(reader: &mut Reader<'_>, top: &DeTable<'_>) -> Vec<PriceRule> {
    let Some(value) = get(top, PRICE.key()) else { return Vec::new() };
    let DeValue::Array(items) = value.get_ref() else {
        let hint = "write [[price]] with two brackets above each price";
        reader.report_at(top, PRICE.key(), "`price` takes a list of prices", hint);
        return Vec::new();
    };
    let mut prices: Vec<(PriceRule, Range<usize>)> = Vec::new();
    let mut currency: Option<Text> = None;
    for item in items {
        let header = reader.clip(item.span());
        let DeValue::Table(table) = item.get_ref() else {
            reader.report(Problem::new(header, "a price must be a table", "write [[price]] above each price"));
            continue;
        };
        let meant = reader.report_unknown_keys(table, PRICE, &[]);
        let own = currency_of(reader, table, &header, &meant);
        if let (Some(first), Some(own)) = (&currency, &own)
            && first.value != own.value
        {
            let message = format!("the prices have two currencies, {} and {}", first.value, own.value);
            let problem = Problem::new(own.span.clone(), message, "write the same currency in all prices");
            reader.report(problem.also(first.span.clone(), "the first is"));
        }
        let Some(price) = price(reader, table, &header, &meant, own.as_ref()) else { continue };
        currency = currency.or(own);
        if let Some((_, first)) = prices.iter().find(|(earlier, _)| earlier.covers(&price)) {
            let hint =
                "only the first price that fits a lease applies: put this one before it, or remove one of the two";
            let problem =
                Problem::new(header.clone(), "this price never applies: an earlier one fits all its leases", hint);
            reader.report(problem.also(first.clone(), "the earlier is"));
        }
        prices.push((price, header));
    }
    prices.into_iter().map(|(price, _)| price).collect()
}

/// Reads one price. Returns `None` if its leases or its currency are not known because of an error.
fn price(
    reader: &mut Reader<'_>,
    table: &DeTable<'_>,
    header: &Range<usize>,
    meant: &[String],
    currency: Option<&Text>,
) -> Option<PriceRule> {
    let before = reader.problems.len();
    let kinds = LeaseKind::ALL.map(|kind| (kind.name(), kind));
    let kind = reader.choice(table, "kind", "kind of lease", &kinds);
    let model = reader.word(table, "model", "\"NVIDIA H100 80GB HBM3\"").map(|text| text.value);
    let per_slice_hour = amount(reader, table, "per_slice_hour");
    let per_lease = amount(reader, table, "per_lease");
    if reader.problems.len() > before {
        return None;
    }
    let is_misspelt = meant.iter().any(|key| key.starts_with("per_"));
    if per_slice_hour.is_none() && per_lease.is_none() && !is_misspelt {
        let hint = "write per_slice_hour = 0.25, the price of a slice for an hour";
        reader.report(Problem::new(header.clone(), "this price has no amount", hint));
    }
    Some(PriceRule {
        kind,
        model,
        per_slice_hour: per_slice_hour.unwrap_or_default(),
        per_lease: per_lease.unwrap_or_default(),
        currency: currency?.value.clone(),
    })
}

/// Reads the currency, which every price must have.
fn currency_of(reader: &mut Reader<'_>, table: &DeTable<'_>, header: &Range<usize>, meant: &[String]) -> Option<Text> {
    if key_span(table, "currency").is_none() {
        if !meant.iter().any(|key| key == "currency") {
            let hint = "write currency = \"EUR\"";
            reader.report(Problem::new(header.clone(), "this price has no currency", hint));
        }
        return None;
    }
    let text = reader.word(table, "currency", "\"EUR\"")?;
    if text.value.len() == 3 && text.value.bytes().all(|byte| byte.is_ascii_uppercase()) {
        return Some(text);
    }
    let upper = text.value.to_ascii_uppercase();
    let is_currency = upper.len() == 3 && upper.bytes().all(|byte| byte.is_ascii_uppercase());
    let meant = if is_currency { upper } else { "EUR".to_owned() };
    let message = format!("{} is not a currency: it needs three capital letters", Quoted(&text.value));
    reader.report(Problem::new(text.span, message, format!("write currency = \"{meant}\"")));
    None
}

/// Reads an amount: a whole number or a decimal number, also in quotes. Decimals are exact, not binary floats.
fn amount(reader: &mut Reader<'_>, table: &DeTable<'_>, key: &str) -> Option<PriceAmount> {
    let value = get(table, key)?;
    let written = match value.get_ref() {
        DeValue::Integer(number) if number.radix() == 10 => number.as_str().to_owned(),
        DeValue::Float(number) => number.as_str().to_owned(),
        DeValue::String(text) => text.to_string(),
        DeValue::Integer(_) | DeValue::Boolean(_) | DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => {
            reader.expected(key, value, "a number", "0.25");
            return None;
        }
    };
    let found = PriceAmount::parse(written.trim().trim_start_matches('+'));
    if found.is_none() {
        let shown: String = written.chars().take(24).collect();
        let message = format!("`{key}` can't be {}", Quoted(&shown));
        let hint = format!("write a number from 0 to {HIGHEST} with at most {DECIMALS} decimals, such as 0.25");
        reader.report(Problem::new(reader.clip(value.span()), message, hint));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, schema};

    const TWO: &str = "[[price]]\nkind = \"mig\"\nmodel = \"NVIDIA H100 80GB HBM3\"\nper_slice_hour = 0.25\n\
                       per_lease = 1.5\ncurrency = \"EUR\"\n[[price]]\nper_slice_hour = 3\ncurrency = \"EUR\"\n";

    #[test]
    fn prices_are_exact_decimals_and_survive_the_effective_config() {
        let config = Config::parse(TWO, "config.toml").unwrap();
        let millionths: Vec<_> = config
            .prices
            .iter()
            .map(|price| (price.per_slice_hour.millionths(), price.per_lease.millionths()))
            .collect();
        assert_eq!(millionths, [(250_000, 1_500_000), (3_000_000, 0)]);
        assert_eq!(Config::parse(&config.effective(), "effective").unwrap(), config);
        assert_eq!(Config::default().differences(&config).len(), 2, "a reload shows both prices");
        let keys: Vec<_> = config.prices[0].written().into_iter().map(|(key, _)| key).collect();
        assert_eq!(keys, schema::PRICE.keys);
    }

    #[test]
    fn amount_has_at_most_six_decimals() {
        let parsed = |text: &str| PriceAmount::parse(text).map(|amount| amount.to_string());
        for (text, expected) in
            [("0", "0"), ("0.10", "0.1"), ("1000000", "1000000"), ("0.0000010", "0.000001"), ("7.", "7")]
        {
            assert_eq!(parsed(text).as_deref(), Some(expected), "{text}");
        }
        for wrong in ["-1", "nan", "inf", "1e3", "0.0000001", "1000000.000001", ".5", "1,5", "", "99999999999999999999"]
        {
            assert_eq!(parsed(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn wrong_prices_are_refused_with_their_line() {
        let rest = "per_slice_hour = 1\ncurrency = \"EUR\"";
        for (text, message, line) in [
            ("[[price]]\nper_slice_hour = -0.5\ncurrency = \"EUR\"".to_owned(), "can't be `-0.5`", 2),
            ("[[price]]\nper_slice_hour = nan\ncurrency = \"EUR\"".to_owned(), "can't be `nan`", 2),
            ("[[price]]\nper_slice_hour = true\ncurrency = \"EUR\"".to_owned(), "takes a number, not a boolean", 2),
            ("[[price]]\nper_slice_hour = 1\ncurrency = \"eur\"".to_owned(), "is not a currency", 3),
            ("[[price]]\nper_slice_hour = 1".to_owned(), "has no currency", 1),
            ("[[price]]\ncurrency = \"EUR\"".to_owned(), "has no amount", 1),
            ("[price]\nper_slice_hour = 1".to_owned(), "takes a list of prices", 1),
            (format!("[[price]]\nkind = \"mgi\"\n{rest}"), "is not a kind of lease", 2),
            (format!("[[price]]\n{rest}\n[[price]]\nkind = \"mps\"\n{rest}"), "never applies", 4),
            (
                format!("[[price]]\nmodel = \"a\"\n{rest}\n[[price]]\nmodel = \"A\"\nkind = \"mps\"\n{rest}"),
                "never applies",
                5,
            ),
            (
                format!("[[price]]\nkind = \"mps\"\n{rest}\n[[price]]\nper_slice_hour = 1\ncurrency = \"USD\""),
                "two currencies, EUR and USD",
                7,
            ),
        ] {
            let errors = Config::parse(&text, "config.toml").unwrap_err().to_string();
            assert!(errors.contains(message) && errors.contains(&format!("config.toml:{line}")), "{text}\n{errors}");
        }
        assert!(Config::parse(&format!("[[price]]\nkind = \"mps\"\n{rest}\n[[price]]\n{rest}"), "x").is_ok());
    }
}
