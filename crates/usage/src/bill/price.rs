//! `[[price]]`: the prices of slices and leases.

use std::fmt;

use gpush_api::LeaseKind;
use gpush_core::{config::names_model, quote::Quoted};
use rust_decimal::Decimal;
use serde::{Deserialize, Serialize};

/// Most decimals of a price. More could make an amount longer than a decimal can be.
const MOST_DECIMALS: u32 = 6;

/// Highest price.
const HIGHEST: i64 = 1_000_000;

/// A price. The first price of the list that fits a lease applies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Price {
    /// Kind of the leases; `None` for all.
    pub kind: Option<LeaseKind>,
    /// GPU model, with or without `NVIDIA`, in any case; `None` for all.
    pub model: Option<String>,
    /// Price of a slice for an hour. A GPU without MIG has one slice.
    pub per_slice_hour: Decimal,
    /// Price of a lease for a calendar month, whatever its length. Only the model `flat` uses it.
    pub per_lease: Decimal,
    /// Currency, such as `EUR`.
    pub currency: String,
}

/// Why prices are refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PriceError {
    /// The currency is not three capital letters.
    Currency(String),
    /// The prices have several currencies, so amounts could not be added.
    Currencies(String, String),
    /// A price is negative or too high, or has too many decimals.
    Amount(Decimal),
}

impl fmt::Display for PriceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Currency(text) => {
                write!(f, "{} is not a currency: write three capital letters, as in EUR", Quoted(text))
            }
            Self::Currencies(one, other) => write!(f, "the prices have two currencies, {one} and {other}: write one"),
            Self::Amount(price) => {
                write!(f, "{price} is not a price: write 0 to {HIGHEST} with at most {MOST_DECIMALS} decimals")
            }
        }
    }
}

impl std::error::Error for PriceError {}

/// The prices of the config, all in one currency.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PriceList {
    prices: Vec<Price>,
}

impl PriceList {
    /// Checks prices.
    ///
    /// # Errors
    /// A currency or a price is not valid, or the currencies differ.
    pub fn new(prices: Vec<Price>) -> Result<Self, PriceError> {
        for price in &prices {
            if price.currency.len() != 3 || !price.currency.bytes().all(|byte| byte.is_ascii_uppercase()) {
                return Err(PriceError::Currency(price.currency.clone()));
            }
            for amount in [price.per_slice_hour, price.per_lease] {
                if amount.is_sign_negative()
                    || amount > Decimal::from(HIGHEST)
                    || amount.normalize().scale() > MOST_DECIMALS
                {
                    return Err(PriceError::Amount(amount));
                }
            }
        }
        if let Some(first) = prices.first()
            && let Some(other) = prices.iter().find(|price| price.currency != first.currency)
        {
            return Err(PriceError::Currencies(first.currency.clone(), other.currency.clone()));
        }
        Ok(Self { prices })
    }

    /// Returns the currency; `None` without prices.
    #[must_use]
    pub fn currency(&self) -> Option<&str> {
        self.prices.first().map(|price| price.currency.as_str())
    }

    /// Returns the price of a lease; `None` if no price fits. Then the lease costs nothing.
    #[must_use]
    pub fn find(&self, kind: LeaseKind, model: &str) -> Option<&Price> {
        let fits = |price: &&Price| {
            price.kind.is_none_or(|wanted| wanted == kind)
                && price.model.as_ref().is_none_or(|wanted| names_model(wanted, model))
        };
        self.prices.iter().find(fits)
    }
}
