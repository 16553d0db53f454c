//! A bill in the columns of FOCUS 1.2 (FinOps Open Cost and Usage Specification).
//!
//! Null is an empty field. A line without a currency or a price costs 0.

use rust_decimal::Decimal;
use serde_json::{Map, Value};

use super::{
    csv::{CsvError, Table, number, part, text},
    lines::{Bill, BillLine, ChargeKind},
    quantity::{gpu_hours, kilowatt_hours, rounded, seconds, time},
};

/// Names that the site has in its bills.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FocusSite {
    /// Name of the site: provider, publisher and issuer.
    pub name: String,
    /// Id of the billing account.
    pub account_id: String,
    /// Name of the billing account.
    pub account_name: String,
    /// Cluster or host.
    pub region: String,
    /// Currency of bills without prices.
    pub currency: String,
}

/// All columns, in their order. The first 21 are the mandatory ones. Columns that FOCUS does not define begin with
/// `x_`, and come last.
pub const FOCUS_COLUMNS: [&str; 44] = [
    "BilledCost",
    "BillingAccountId",
    "BillingAccountName",
    "BillingCurrency",
    "BillingPeriodEnd",
    "BillingPeriodStart",
    "ChargeCategory",
    "ChargeClass",
    "ChargeDescription",
    "ChargePeriodEnd",
    "ChargePeriodStart",
    "ContractedCost",
    "EffectiveCost",
    "InvoiceIssuerName",
    "ListCost",
    "PricingQuantity",
    "PricingUnit",
    "ProviderName",
    "PublisherName",
    "ServiceCategory",
    "ServiceName",
    "ChargeFrequency",
    "ConsumedQuantity",
    "ConsumedUnit",
    "ContractedUnitPrice",
    "InvoiceId",
    "ListUnitPrice",
    "PricingCategory",
    "RegionId",
    "ResourceId",
    "ResourceName",
    "ResourceType",
    "ServiceSubcategory",
    "SkuId",
    "SkuMeter",
    "SkuPriceId",
    "SubAccountId",
    "SubAccountName",
    "Tags",
    "x_AllocatedRatio",
    "x_EnergyKilowattHours",
    "x_EnergyMethod",
    "x_IdleHours",
    "x_UnknownHours",
];

/// Unit of the quantities.
const GPU_HOURS: &str = "GPU-Hours";

/// Returns the bill as CSV with the columns of FOCUS 1.2. Quantities are hours of a whole GPU.
///
/// # Errors
/// The writer fails.
pub fn focus_csv(bill: &Bill, site: &FocusSite) -> Result<String, CsvError> {
    let mut table = Table::new(FOCUS_COLUMNS)?;
    for line in &bill.lines {
        let cells: Vec<String> = FOCUS_COLUMNS.iter().map(|column| cell(column, line, bill, site)).collect();
        table.line(&cells)?;
    }
    table.finish()
}

/// Returns the cell of a line in one column.
fn cell(column: &str, line: &BillLine, bill: &Bill, site: &FocusSite) -> String {
    let owner = line.of.owner.as_ref();
    let sub_account = owner.map(|owner| owner.account.as_ref().unwrap_or(&owner.user));
    match column {
        "BilledCost" | "EffectiveCost" => number(line.amount),
        "ListCost" | "ContractedCost" => {
            number(priced(line).map_or(line.amount, |(_, price, quantity)| price * quantity))
        }
        "BillingAccountId" => text(&site.account_id),
        "BillingAccountName" => text(&site.account_name),
        "BillingCurrency" => bill.currency.clone().unwrap_or_else(|| site.currency.clone()),
        "BillingPeriodStart" => time(bill.month.start_ms()),
        "BillingPeriodEnd" => time(bill.month.end_ms()),
        "ChargePeriodStart" => time(line.from_ms),
        "ChargePeriodEnd" => time(line.until_ms),
        "ChargeCategory" => match line.charge {
            ChargeKind::Usage | ChargeKind::Unallocated => "Usage".to_owned(),
            ChargeKind::Adjustment => "Adjustment".to_owned(),
        },
        "ChargeClass" => match line.charge {
            ChargeKind::Usage | ChargeKind::Unallocated => String::new(),
            ChargeKind::Adjustment => "Correction".to_owned(),
        },
        "ChargeDescription" => text(&description(line)),
        "ChargeFrequency" => match line.charge {
            ChargeKind::Usage | ChargeKind::Unallocated => "Usage-Based".to_owned(),
            ChargeKind::Adjustment => "One-Time".to_owned(),
        },
        "InvoiceIssuerName" | "ProviderName" | "PublisherName" => text(&site.name),
        "ServiceCategory" => "Compute".to_owned(),
        "ServiceName" => "GPU sharing".to_owned(),
        "ServiceSubcategory" => "Other (Compute)".to_owned(),
        "InvoiceId" => text(&format!("{}-{}", site.account_id, bill.month)),
        "PricingQuantity" => priced(line).map(|(_, _, quantity)| number(quantity)).unwrap_or_default(),
        "PricingUnit" => priced(line).map(|_| GPU_HOURS.to_owned()).unwrap_or_default(),
        "ConsumedQuantity" => priced(line).map(|_| number(gpu_hours(line.busy_unit_ms))).unwrap_or_default(),
        "ConsumedUnit" => priced(line).map(|_| GPU_HOURS.to_owned()).unwrap_or_default(),
        "ContractedUnitPrice" | "ListUnitPrice" => priced(line).map(|(_, price, _)| number(price)).unwrap_or_default(),
        "PricingCategory" => priced(line).map(|_| "Standard".to_owned()).unwrap_or_default(),
        "RegionId" => text(&site.region),
        "ResourceId" => line.target.as_ref().map(|target| text(target.as_str())).unwrap_or_default(),
        "ResourceName" => line.of.lease.map(|lease| lease.to_string()).unwrap_or_default(),
        "ResourceType" => line.kind.map(|kind| kind.name().to_owned()).unwrap_or_default(),
        "SkuId" => priced(line).map(|(sku, _, _)| text(&sku)).unwrap_or_default(),
        "SkuMeter" => priced(line).map(|_| "GPU share".to_owned()).unwrap_or_default(),
        "SkuPriceId" => {
            priced(line).map(|(sku, price, _)| text(&format!("{sku}@{}", number(price)))).unwrap_or_default()
        }
        "SubAccountId" | "SubAccountName" => sub_account.map(|name| text(name)).unwrap_or_default(),
        "Tags" => tags(line),
        "x_AllocatedRatio" => line.kind.map(|_| number(part(line))).unwrap_or_default(),
        "x_EnergyKilowattHours" => {
            line.gpu.as_ref().map(|_| number(kilowatt_hours(line.energy_mj))).unwrap_or_default()
        }
        "x_EnergyMethod" => line.kind.map(|_| line.energy_method.name().to_owned()).unwrap_or_default(),
        "x_IdleHours" => line.kind.map(|_| number(hours_of(line.times.unused_ms()))).unwrap_or_default(),
        "x_UnknownHours" => line.kind.map(|_| number(hours_of(line.times.unknown_ms))).unwrap_or_default(),
        _ => String::new(),
    }
}

/// Returns SKU, price of a GPU hour and GPU hours of a line that is charged by the hour.
fn priced(line: &BillLine) -> Option<(String, Decimal, Decimal)> {
    let slice_price = line.unit_price?;
    let model = line.model.as_ref();
    let slices = model.map_or(1, |model| model.slices.max(1));
    let kind = line.kind.map_or("unallocated", gpush_api::LeaseKind::name);
    let name = model.map_or("unknown", |model| &model.model);
    Some((format!("{name}/{kind}"), slice_price * Decimal::from(slices), gpu_hours(line.charged_unit_ms)))
}

fn hours_of(ms: u64) -> Decimal {
    rounded(seconds(ms) / Decimal::from(3600_u32))
}

fn description(line: &BillLine) -> String {
    let model = line.model.as_ref().map_or("GPU of unknown model", |model| &model.model);
    match (line.charge, line.kind) {
        (ChargeKind::Adjustment, _) => line.description.clone(),
        (ChargeKind::Usage, Some(kind)) => format!("Share of {model}, kind {}", kind.name()),
        (ChargeKind::Usage | ChargeKind::Unallocated, _) => format!("Unallocated capacity of {model}"),
    }
}

/// Returns lease, group and job as a JSON object.
fn tags(line: &BillLine) -> String {
    let owner = line.of.owner.as_ref();
    let pairs = [
        ("lease", line.of.lease.map(|lease| lease.to_string())),
        ("user", owner.map(|owner| owner.user.clone())),
        ("group", owner.and_then(|owner| owner.group.clone())),
        ("job", owner.and_then(|owner| owner.job.clone())),
    ];
    let object: Map<String, Value> =
        pairs.into_iter().filter_map(|(key, value)| Some((key.to_owned(), Value::String(value?)))).collect();
    if object.is_empty() { String::new() } else { Value::Object(object).to_string() }
}
