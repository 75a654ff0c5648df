//! The OpenAPI document, by which answers are judged more strictly than it says: what it does not name must not be there.

use std::cell::RefCell;
use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

/// The document, and what of it was used.
pub struct Document {
    text: Value,
    used: RefCell<BTreeSet<(String, String)>>,
}

impl Document {
    /// As a host serves it.
    pub fn of(mut text: Value) -> Result<Self> {
        ensure!(
            text["openapi"]
                .as_str()
                .is_some_and(|version| version.starts_with("3.1")),
            "OpenAPI 3.1 has JSON Schema in it"
        );
        let schemas = text["components"]["schemas"].as_object_mut().context("schemas")?;
        ensure!(schemas.len() > 20, "only {} types", schemas.len());
        schemas.values_mut().for_each(close);
        // What stands in another object beside its tag is closed by that one.
        let mut open = schemas.clone();
        open.values_mut().for_each(reopen);
        text["components"]["open"] = Value::Object(open);
        let this = Self {
            text,
            used: RefCell::default(),
        };
        let mut names: Vec<&Value> = this.operations().map(|(_, _, of)| &of["operationId"]).collect();
        let all = names.len();
        names.sort_by_key(|name| name.to_string());
        names.dedup();
        ensure!(names.len() == all, "two operations have one name: {names:?}");
        Ok(this)
    }

    /// Whether that answer is one that the document has for that request.
    pub fn check(&self, method: &str, path: &str, status: u16, answer: &Value) -> Result<()> {
        let operation = &self.text["paths"][path][method];
        ensure!(operation.is_object(), "{method} {path} is not in the document");
        self.used
            .borrow_mut()
            .insert((method.to_owned(), path.to_owned()));
        let responses = &operation["responses"];
        let exact = &responses[status.to_string()];
        let wide = &responses[format!("{}XX", status / 100)];
        let response = if exact.is_object() { exact } else { wide };
        let schema = &response["content"]["application/json"]["schema"];
        ensure!(
            schema.is_object(),
            "{method} {path}: the document has no answer {status}"
        );
        self.fits(schema, answer)
            .with_context(|| format!("{method} {path}: {status}"))
    }

    /// Whether each line is an `Answer`, and the document offers lines there; returns how many there are.
    #[allow(dead_code, reason = "not every test has lines")]
    pub fn check_lines(&self, method: &str, path: &str, body: &str) -> Result<usize> {
        let operation = &self.text["paths"][path][method];
        let schema = &operation["responses"]["200"]["content"]["application/x-ndjson"]["schema"];
        ensure!(schema.is_object(), "{method} {path} offers no lines");
        self.used
            .borrow_mut()
            .insert((method.to_owned(), path.to_owned()));
        for line in body.lines() {
            let line: Value = serde_json::from_str(line).with_context(|| format!("no JSON: {line}"))?;
            self.fits(schema, &line)
                .with_context(|| format!("{method} {path}"))?;
        }
        Ok(body.lines().count())
    }

    /// Whether that value is of that type.
    #[allow(dead_code, reason = "not every test has streams")]
    pub fn check_type(&self, name: &str, value: &Value) -> Result<()> {
        ensure!(
            self.text["components"]["schemas"][name].is_object(),
            "no type {name}"
        );
        self.fits(&json!({"$ref": format!("#/components/schemas/{name}")}), value)
            .with_context(|| name.to_owned())
    }

    fn fits(&self, schema: &Value, value: &Value) -> Result<()> {
        let whole = json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "components": self.text["components"],
            "allOf": [schema],
        });
        let validator = jsonschema::validator_for(&whole).context("the document is no schema")?;
        let wrong: Vec<String> = validator
            .iter_errors(value)
            .map(|error| format!("{error} at {}", error.instance_path()))
            .collect();
        ensure!(wrong.is_empty(), "{}\n{value:#}", wrong.join("\n"));
        Ok(())
    }

    /// Requests in the document that were never checked; streams have their types checked.
    #[allow(dead_code, reason = "one test asks for everything")]
    pub fn unused(&self) -> BTreeSet<(String, String)> {
        let used = self.used.borrow();
        self.operations()
            .map(|(method, path, _)| (method.clone(), path.clone()))
            .filter(|operation| operation.1 != "/api/v1/stream" && !used.contains(operation))
            .collect()
    }

    /// Method, path and what is said of each.
    fn operations(&self) -> impl Iterator<Item = (&String, &String, &Value)> {
        let paths = self.text["paths"].as_object().into_iter().flatten();
        paths.flat_map(|(path, methods)| {
            let methods = methods.as_object().into_iter().flatten();
            methods.map(move |(method, of)| (method, path, of))
        })
    }
}

/// Objects have what is named and nothing else.
fn close(schema: &mut Value) {
    let has_names = schema.get("properties").is_some() && schema.get("additionalProperties").is_none();
    match schema {
        Value::Object(map) => map.values_mut().for_each(close),
        Value::Array(all) => all.iter_mut().for_each(close),
        _ => {}
    }
    if let Some(parts) = schema.get_mut("allOf").and_then(Value::as_array_mut) {
        parts.iter_mut().for_each(reopen);
        schema["unevaluatedProperties"] = json!(false);
    } else if has_names {
        schema["unevaluatedProperties"] = json!(false);
    }
}

/// An object that is a part of another one: what it does not name may be the other's.
fn reopen(schema: &mut Value) {
    let Some(map) = schema.as_object_mut() else { return };
    map.remove("unevaluatedProperties");
    if let Some(Value::String(name)) = map.get_mut("$ref") {
        *name = name.replace("#/components/schemas/", "#/components/open/");
    }
    for parts in ["allOf", "oneOf", "anyOf"] {
        let parts = map.get_mut(parts).and_then(Value::as_array_mut);
        parts.into_iter().flatten().for_each(reopen);
    }
}
