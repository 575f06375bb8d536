//! The OpenAPI description, generated from the endpoints. A test keeps `openapi.json`, beside this
//! crate's manifest, up to date.

use utoipa::openapi::path::{
    Operation, OperationBuilder, Parameter, ParameterBuilder, ParameterIn,
};
use utoipa::openapi::request_body::RequestBodyBuilder;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{
    ComponentsBuilder, ContentBuilder, HttpMethod, InfoBuilder, LicenseBuilder, ObjectBuilder,
    OpenApi, OpenApiBuilder, PathsBuilder, Ref, Required, Response, ResponseBuilder, Type,
};

use crate::endpoint::{self, Endpoint, Payload, Schemas};
use crate::{ApiError, ErrorCode, PoolName, VolumeName};

/// The description of the whole API.
#[must_use]
pub fn describe() -> OpenApi {
    let mut walk = EndpointCollector::default();
    endpoint::visit(&mut walk);
    <ApiError as Payload>::schemas(&mut walk.schemas);
    <VolumeName as Payload>::schemas(&mut walk.schemas);
    <PoolName as Payload>::schemas(&mut walk.schemas);
    let mut components = ComponentsBuilder::new();
    for (name, schema) in walk.schemas {
        components = components.schema(name, schema);
    }
    let token = SecurityScheme::Http(
        HttpBuilder::new()
            .scheme(HttpAuthScheme::Bearer)
            .description(Some("Needed over TCP. The Unix socket is protected by its file mode."))
            .build(),
    );
    let mut info = InfoBuilder::new()
        .title("Windrose node")
        .version("1")
        .description(Some("The control plane of one Windrose node. Sizes are in bytes."))
        .build();
    info.license =
        Some(LicenseBuilder::new().name("Apache-2.0").identifier(Some("Apache-2.0")).build());
    OpenApiBuilder::new()
        .info(info)
        .paths(walk.paths.path("/metrics", metrics_path()).build())
        .components(Some(components.security_scheme("token", token).build()))
        .security(Some([SecurityRequirement::new("token", Vec::<String>::new())]))
        .build()
}

/// The contents of `openapi.json`.
///
/// # Panics
/// Never: the description is made of strings and lists.
#[must_use]
pub fn json() -> String {
    let mut text = describe().to_pretty_json().expect("strings and lists always serialise");
    text.push('\n');
    text
}

#[derive(Default)]
struct EndpointCollector {
    paths: PathsBuilder,
    schemas: Schemas,
}

impl endpoint::EndpointVisitor for EndpointCollector {
    fn endpoint<E: Endpoint>(&mut self) {
        E::Body::schemas(&mut self.schemas);
        E::Response::schemas(&mut self.schemas);
        let paths = std::mem::take(&mut self.paths).build();
        let mut paths = paths;
        paths.add_path_operation(E::PATH, vec![http_method::<E>()], operation::<E>());
        self.paths = paths.into();
    }
}

fn http_method<E: Endpoint>() -> HttpMethod {
    match E::METHOD.as_str() {
        "GET" => HttpMethod::Get,
        "PUT" => HttpMethod::Put,
        "POST" => HttpMethod::Post,
        "DELETE" => HttpMethod::Delete,
        other => unreachable!("no endpoint uses {other}"),
    }
}

fn operation<E: Endpoint>() -> Operation {
    let mut operation = OperationBuilder::new()
        .operation_id(Some(E::OPERATION_ID))
        .summary(Some(E::SUMMARY))
        .response(E::STATUS.to_string(), response::<E::Response>("Done."));
    if E::PATH.contains("{name}") {
        operation = operation.parameter(name_parameter(E::PATH));
    }
    for flag in E::FLAGS {
        operation = operation.parameter(
            ParameterBuilder::new()
                .name(flag.name)
                .parameter_in(ParameterIn::Query)
                .required(Required::False)
                .description(Some(flag.description))
                .schema(Some(ObjectBuilder::new().schema_type(Type::Boolean)))
                .build(),
        );
    }
    if let Some(schema) = E::Body::schema_name() {
        let content = ContentBuilder::new().schema(Some(Ref::from_schema_name(schema))).build();
        let body = RequestBodyBuilder::new()
            .content("application/json", content)
            .required(Some(Required::True))
            .build();
        operation = operation.request_body(Some(body));
    }
    for (status, codes) in error_responses::<E>() {
        operation = operation.response(status.to_string(), response::<ApiError>(&codes));
    }
    operation.build()
}

/// The error statuses of an endpoint, and the codes of each.
fn error_responses<E: Endpoint>() -> std::collections::BTreeMap<u16, String> {
    let always = [ErrorCode::Unauthorized, ErrorCode::Unavailable, ErrorCode::Internal];
    let with_body = [ErrorCode::InvalidRequest, ErrorCode::TooLarge];
    let with_name = [ErrorCode::InvalidRequest];
    let body = if E::Body::IS_EMPTY { &[][..] } else { &with_body };
    let name = if E::PATH.contains("{name}") { &with_name[..] } else { &[] };
    let mut by_status = std::collections::BTreeMap::<u16, Vec<String>>::new();
    for code in always.iter().chain(body).chain(name).chain(E::ERROR_CODES) {
        let word = serde_json::to_value(code).expect("a word");
        let word = format!("`{}`", word.as_str().unwrap_or_default());
        let words = by_status.entry(code.status()).or_default();
        if !words.contains(&word) {
            words.push(word);
        }
    }
    by_status.into_iter().map(|(status, words)| (status, words.join(", "))).collect()
}

fn response<P: Payload>(description: &str) -> Response {
    let response = ResponseBuilder::new().description(description);
    match P::schema_name() {
        None => response.build(),
        Some(schema) => {
            let schema = Ref::from_schema_name(schema);
            let content = ContentBuilder::new().schema(Some(schema)).build();
            response.content("application/json", content).build()
        }
    }
}

/// The name in a path: of a pool or a volume.
fn name_parameter(path: &str) -> Parameter {
    let (about, schema) = match path.starts_with("/v1/pools/") {
        true => ("Name of the pool.", "PoolName"),
        false => ("Name of the volume.", "VolumeName"),
    };
    ParameterBuilder::new()
        .name("name")
        .parameter_in(ParameterIn::Path)
        .required(Required::True)
        .description(Some(about))
        .schema(Some(Ref::from_schema_name(schema)))
        .build()
}

fn metrics_path() -> utoipa::openapi::PathItem {
    let text =
        ContentBuilder::new().schema(Some(ObjectBuilder::new().schema_type(Type::String))).build();
    let response = ResponseBuilder::new()
        .description("Metrics in the OpenMetrics text format.")
        .content("application/openmetrics-text", text)
        .build();
    let operation = OperationBuilder::new()
        .operation_id(Some("GetMetrics"))
        .summary(Some("Returns the metrics of the node for Prometheus."))
        .response("200", response)
        .build();
    utoipa::openapi::PathItem::new(HttpMethod::Get, operation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checked_in_description_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/openapi.json");
        if std::env::var_os("UPDATE").is_some() {
            std::fs::write(path, json()).unwrap();
        }
        let checked_in = std::fs::read_to_string(path).unwrap_or_default();
        assert!(checked_in == json(), "run UPDATE=1 cargo test -p api to write openapi.json");
    }

    #[test]
    fn every_reference_leads_somewhere() {
        let api = serde_json::to_value(describe()).unwrap();
        let schemas = api["components"]["schemas"].as_object().unwrap();
        let text = api.to_string();
        for reference in text.split("#/components/schemas/").skip(1) {
            let name = reference.split('"').next().unwrap();
            assert!(schemas.contains_key(name), "{name}");
        }
    }

    #[test]
    fn no_answer_has_room_for_a_secret() {
        let api = serde_json::to_value(describe()).unwrap();
        let schemas = &api["components"]["schemas"];
        let holders: Vec<_> = schemas
            .as_object()
            .unwrap()
            .iter()
            .filter(|(_, schema)| {
                let text = schema.to_string();
                text.contains("Secret\"") || text.contains("TlsKey\"")
            })
            .map(|(name, _)| name.as_str())
            .collect();
        assert_eq!(holders, ["Chap", "Dhchap", "MutualChap", "Tls"]);
        for answer in ["Volume", "Access", "Status", "SessionList", "VolumeList"] {
            let text = schemas[answer].to_string();
            for holder in ["Chap\"", "Dhchap\"", "Tls\""] {
                assert!(!text.contains(holder), "{answer}");
            }
        }
    }
}
