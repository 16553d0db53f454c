//! `/v1/openapi.json`: the description of this API.
//!
//! `docs/openapi.json` is generated from the code and committed, so gpushd contains only the finished text. A unit test
//! compares this file with the code. `cargo xtask openapi` makes the test write the file instead.

use axum::{Router, http::header, response::IntoResponse, routing::get};

use super::{HttpHandles, without_parameters};

/// Returns the routes of this module.
pub(super) fn routes() -> Router<HttpHandles> {
    without_parameters(Router::new().route("/v1/openapi.json", get(show)))
}

/// The committed description of the API.
const TEXT: &str = include_str!("../../../../docs/openapi.json");

/// Returns the description of this API, OpenAPI 3.1.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/openapi.json", operation_id = "getDescription", tag = "about",
    responses((status = 200, description = "This description", content_type = "application/json"), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn show() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], TEXT)
}

/// The paths of this module, for the description of the API.
#[cfg(test)]
#[derive(utoipa::OpenApi)]
#[openapi(paths(show))]
pub(super) struct DescriptionPaths;

#[cfg(test)]
mod naming;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use utoipa::OpenApi;

    use crate::serve::http::{
        audit, bill, config, enforcement, events, gpus, health, host, idle, leases, mig, mps, openapi, operations,
        overrides, processes, quotas, slurm, usage,
    };

    /// The description without its paths.
    #[derive(OpenApi)]
    #[openapi(
        info(
            title = "gpush",
            description = "How the GPUs of one host are shared. Served on a Unix socket; gpushd identifies the \
                           caller by its socket peer credentials. Within v1 fields are added, never renamed or removed."
        ),
        tags(
            (name = "gpus", description = "GPUs and their profiles"),
            (name = "host", description = "Maintenance and recovery of the host"),
            (name = "mig", description = "MIG layouts"),
            (name = "mps", description = "MPS daemons"),
            (name = "leases", description = "Shares of GPUs for users"),
            (name = "slurm", description = "Slurm's hooks"),
            (name = "operations", description = "Changes that gpushd executes"),
            (name = "events", description = "Stream of changes"),
            (name = "audit", description = "The audit trail: who changed what"),
            (name = "config", description = "The effective config"),
            (name = "about", description = "The agent itself")
        )
    )]
    struct Api;

    /// If this variable is set, the test writes the file instead of comparing it.
    const WRITE: &str = "GPUSH_WRITE_OPENAPI";

    /// Generates the description from the code.
    fn from_code() -> String {
        let paths = [
            audit::AuditPaths::openapi(),
            config::ConfigPaths::openapi(),
            events::EventPaths::openapi(),
            gpus::GpuPaths::openapi(),
            health::HealthPaths::openapi(),
            enforcement::EnforcementPaths::openapi(),
            host::HostPaths::openapi(),
            idle::IdlePaths::openapi(),
            leases::LeasePaths::openapi(),
            mig::MigPaths::openapi(),
            mps::MpsPaths::openapi(),
            openapi::DescriptionPaths::openapi(),
            operations::OperationPaths::openapi(),
            overrides::OverridePaths::openapi(),
            processes::ProcessPaths::openapi(),
            quotas::QuotaPaths::openapi(),
            slurm::SlurmPaths::openapi(),
            usage::UsagePaths::openapi(),
            bill::BillPaths::openapi(),
        ];
        let mut document = paths.into_iter().fold(Api::openapi(), utoipa::openapi::OpenApi::merge_from);
        constrain(&mut document);
        format!("{}\n", document.to_pretty_json().unwrap())
    }

    /// Adds constraints that the types of parameters do not express: ranges, lengths, and that a header is never
    /// `null`.
    fn constrain(document: &mut utoipa::openapi::OpenApi) {
        use utoipa::openapi::{
            RefOr, Schema,
            path::ParameterBuilder,
            schema::{SchemaFormat, SchemaType, Type},
        };

        for (path, item) in &mut document.paths.paths {
            for operation in [&mut item.get, &mut item.post, &mut item.delete].into_iter().flatten() {
                for parameter in operation.parameters.iter_mut().flatten() {
                    let example: Option<&str> = match (parameter.name.as_str(), path.split('/').nth(2)) {
                        ("gpu" | "target", _) if path.contains('{') => Some("0"),
                        ("id", Some("operations")) => Some("op-1"),
                        ("id", Some("leases")) => Some("L1"),
                        _ => None,
                    };
                    if let Some(example) = example {
                        *parameter = ParameterBuilder::from(parameter.clone()).example(Some(example.into())).build();
                    }
                    let Some(RefOr::T(Schema::Object(schema))) = &mut parameter.schema else { continue };
                    // All numbers of the API are unsigned.
                    if schema.minimum.is_some() && schema.format.is_some() {
                        schema.format = Some(SchemaFormat::Custom("uint64".to_owned()));
                    }
                    if let SchemaType::Array(types) = &schema.schema_type
                        && let Some(first) = types.iter().find(|one| **one != Type::Null)
                    {
                        schema.schema_type = SchemaType::Type(first.clone());
                    }
                    match (parameter.name.as_str(), path.as_str()) {
                        ("idempotency-key", _) => {
                            (schema.min_length, schema.max_length) = (Some(1), Some(128));
                            schema.pattern = Some("^[!-~]+$".to_owned());
                        }
                        ("limit", "/v1/operations") => {
                            (schema.minimum, schema.maximum) = (Some(1.into()), Some(200.into()));
                        }
                        ("ended", _) => schema.maximum = Some(100.into()),
                        ("limit", _) => (schema.minimum, schema.maximum) = (Some(1.into()), Some(1000.into())),
                        ("lines", _) => schema.maximum = Some(2000.into()),
                        ("id" | "gpu" | "target", _) if path.contains('{') => schema.min_length = Some(1),
                        _ => {}
                    }
                }
            }
        }
    }

    #[test]
    fn committed_description_matches_the_code() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/openapi.json");
        if std::env::var_os(WRITE).is_some() {
            std::fs::write(path, from_code()).unwrap();
            return;
        }
        let from_code = from_code();
        let differs = super::TEXT.lines().zip(from_code.lines()).enumerate().find(|(_, (file, code))| file != code);
        assert_eq!(differs, None, "docs/openapi.json is out of date: run `cargo xtask openapi`");
        assert_eq!(super::TEXT.len(), from_code.len(), "docs/openapi.json is out of date: run `cargo xtask openapi`");
    }

    /// Every route can refuse a request, for example one with unknown parameters.
    #[test]
    fn every_operation_describes_its_errors() {
        let described: serde_json::Value = serde_json::from_str(&from_code()).unwrap();
        let paths = described["paths"].as_object().unwrap().iter();
        let operations = paths.flat_map(|(path, item)| {
            item.as_object().unwrap().iter().map(move |(method, operation)| (format!("{method} {path}"), operation))
        });
        let error = "#/components/schemas/ApiError";
        let silent: Vec<String> = operations
            .filter(|(_, one)| one["responses"]["default"]["content"]["application/json"]["schema"]["$ref"] != error)
            .map(|(name, _)| name)
            .collect();
        assert!(silent.is_empty(), "{silent:?}");
    }

    #[test]
    fn every_route_is_described() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/serve/http");
        let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let source: String =
            files.filter(|path| path.is_file()).map(|path| std::fs::read_to_string(path).unwrap()).collect();
        let routes = source.split(".route(\"").skip(1).filter_map(|rest| rest.split('"').next());
        let described: serde_json::Value = serde_json::from_str(&from_code()).unwrap();
        // A path occurs twice if only some of its methods take query parameters. Count it once.
        let routes: std::collections::BTreeSet<&str> = routes.collect();
        let count = routes.len();
        for route in routes {
            assert!(described["paths"][route].is_object(), "{route}");
        }
        assert_eq!(count, described["paths"].as_object().unwrap().len());
        let paths = described["paths"].as_object().unwrap().values();
        let ids: Vec<&str> = paths
            .flat_map(|path| path.as_object().unwrap().values())
            .filter_map(|o| o["operationId"].as_str())
            .collect();
        let unique: std::collections::BTreeSet<&&str> = ids.iter().collect();
        assert_eq!(ids.len(), unique.len(), "{ids:?}");
        assert!(ids.len() >= count, "{ids:?}");
    }
}
