//! Layers become routes: every name is looked up, every route takes what it does not say from the layer before.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use taskonce_core::key::Handler;
use taskonce_core::policy::{Backoff, Effect, Policy};

use super::builder::{Layer, RouteLayer, RoutesBuilder};
use super::check::{self, Found, Layers};
use super::file::key;
use super::{
    BreakerRules, Fault, Place, ROUTES_MAX, RateRules, Refused, Route, RouteId, Routes, Settings, SourceRules,
    StoreAway, command,
};
use crate::source::HANDLER_MAX;

/// The version of a handler of which the table names none.
const VERSION: &str = "1";

/// Makes the table, or tells everything that is wrong.
pub(super) fn build(mut table: RoutesBuilder) -> Result<Routes, Refused> {
    let mut faults = std::mem::take(&mut table.faults);
    check::alone(&table.defaults, &mut faults);
    check::urls(&table, &mut faults);
    let sources = sources(&table, &mut faults);
    let handlers = Handlers::of(&table, &mut faults);
    let found = expand(&table.routes, &sources, &handlers, &mut faults);
    let mut routes = Vec::with_capacity(found.len());
    let mut contradictions = Found::default();
    let mut warnings = Found::default();
    let (mut commands, mut useless) = (HashMap::new(), Vec::<Fault>::new());
    for (&(source, handler), layers) in &found {
        let (rules, of_source) = &table.sources[source];
        let one = &handlers.all[handler];
        let said = [Some(&table.defaults), Some(of_source), one.general, one.specific, layers.general, layers.specific];
        let layers = Layers(said.into_iter().flatten().collect());
        let id = RouteId(u32::try_from(routes.len()).unwrap_or(u32::MAX));
        if let Some(route) = route(id, rules, one, &layers, &mut contradictions) {
            check::contradictions(&route, rules, &layers, &mut contradictions);
            check::warnings(&route, rules, &layers, &mut warnings);
            if !commands.contains_key(&route.handler) {
                let (rules, warning) = command::resolve(one.general, one.specific);
                if let Some(warning) = warning.filter(|warning| !useless.contains(warning)) {
                    useless.push(warning);
                }
                commands.insert(Arc::clone(&route.handler), rules.map(Arc::new));
            }
            if let Some(Some(rules)) = commands.get(&route.handler) {
                check::command_warnings(&route, rules, &layers, &mut warnings);
            }
            routes.push(route);
        }
    }
    faults.extend(contradictions.into_faults());
    if table.routes.is_empty() && faults.is_empty() {
        faults.push(fault("the table has no route", "name what serves what, such as `[routes.orders.charge]`"));
    }
    if routes.len() > ROUTES_MAX {
        let text = format!("the table has {} routes; at most {ROUTES_MAX} are allowed", routes.len());
        faults.push(fault(text, "tell tasks of one handler apart by their payload"));
    }
    if !faults.is_empty() {
        faults.sort_by_key(|fault| fault.line.unwrap_or(usize::MAX));
        return Err(Refused { faults });
    }
    let mut warnings = warnings.into_faults();
    warnings.extend(useless);
    unserved(&table, &found, &handlers, &mut warnings);
    let sources: Vec<SourceRules> = table.sources.into_iter().map(|(rules, _)| rules).collect();
    let place = |(at, source): (usize, &SourceRules)| (Arc::clone(&source.name), Place { at, ..Place::default() });
    let mut index: HashMap<Arc<str>, Place> = sources.iter().enumerate().map(place).collect();
    // Routes are in the order of their sources.
    for of_source in routes.chunk_by(|one, next| one.source == next.source) {
        let begin = of_source[0].id.0 as usize;
        let place = index.entry(Arc::clone(&of_source[0].source)).or_default();
        place.routes = begin..begin + of_source.len();
        place.handlers = of_source.iter().map(|route| (Arc::clone(&route.handler), route.id)).collect();
    }
    let commands = commands.into_iter().filter_map(|(handler, rules)| Some((handler, rules?))).collect();
    Ok(Routes { store: table.store.map(|(url, _)| url), commands, sources, routes, index, warnings })
}

fn fault(text: impl Into<String>, hint: impl Into<String>) -> Fault {
    Fault { line: None, subject: String::new(), text: text.into(), hint: hint.into() }
}

/// The place of each source in the table.
fn sources<'a>(table: &'a RoutesBuilder, faults: &mut Vec<Fault>) -> HashMap<&'a str, usize> {
    let mut places = HashMap::new();
    for (at, (rules, layer)) in table.sources.iter().enumerate() {
        let name = &*rules.name;
        if name.is_empty() || name.len() > HANDLER_MAX || name.contains(char::is_control) {
            let text = format!("the name of a source has 1 to {HANDLER_MAX} bytes without control characters");
            faults.push(layer.fault("", text, "name it as the source calls itself, `name=` in its URL"));
        }
        if places.insert(name, at).is_some() {
            faults.push(layer.fault("", "it is there twice", "keep one of them"));
        }
        check::source(rules, layer, faults);
        check::alone(layer, faults);
    }
    places
}

/// The versions of all handlers.
struct Handlers<'a> {
    all: Vec<OneVersion<'a>>,
    by_name: HashMap<&'a str, Vec<usize>>,
}

/// One version of a handler, and the layers that are about it.
struct OneVersion<'a> {
    name: &'a str,
    version: &'a str,
    general: Option<&'a Layer>,
    specific: Option<&'a Layer>,
}

impl<'a> Handlers<'a> {
    fn of(table: &'a RoutesBuilder, faults: &mut Vec<Fault>) -> Handlers<'a> {
        let mut general: HashMap<&str, &Layer> = HashMap::new();
        let mut handlers = Handlers { all: Vec::new(), by_name: HashMap::new() };
        let mut seen: HashMap<(&str, &str), &Layer> = HashMap::new();
        for (text, layer) in &table.handlers {
            check::alone(layer, faults);
            command::alone(layer, faults);
            let (name, version) = split(text);
            if let Err(error) = Handler::new(name, version.unwrap_or(VERSION)) {
                faults.push(layer.fault(
                    "",
                    error.to_string(),
                    "name it `charge`, or `charge@2` for one version of it",
                ));
            }
            let is_twice = match version {
                None => general.insert(name, layer).is_some(),
                Some(version) => seen.insert((name, version), layer).is_some(),
            };
            if is_twice {
                faults.push(layer.fault("", "it is there twice", "keep one of them"));
            }
        }
        let versioned: HashSet<&str> = seen.keys().map(|(name, _)| *name).collect();
        for (text, _) in &table.handlers {
            let (name, version) = split(text);
            let version = match version {
                Some(version) => version,
                None if versioned.contains(name) => continue,
                None => VERSION,
            };
            let places = handlers.by_name.entry(name).or_default();
            if places.iter().any(|at| handlers.all[*at].version == version) {
                continue;
            }
            places.push(handlers.all.len());
            let specific = seen.get(&(name, version)).copied();
            handlers.all.push(OneVersion { name, version, general: general.get(name).copied(), specific });
        }
        handlers
    }

    /// The versions that a route means.
    fn meant(&self, handler: &str) -> Vec<usize> {
        let (name, version) = split(handler);
        let all = self.by_name.get(name).map_or(&[][..], Vec::as_slice);
        all.iter().copied().filter(|at| version.is_none_or(|version| version == self.all[*at].version)).collect()
    }
}

fn split(handler: &str) -> (&str, Option<&str>) {
    match handler.split_once('@') {
        Some((name, version)) => (name, Some(version)),
        None => (handler, None),
    }
}

/// What is said of one route, of all versions of its handler and of the one.
#[derive(Default)]
struct Said<'a> {
    general: Option<&'a Layer>,
    specific: Option<&'a Layer>,
}

/// The routes, by the places of source and handler, with what is said of each.
fn expand<'a>(
    routes: &'a [RouteLayer],
    sources: &HashMap<&str, usize>,
    handlers: &Handlers<'_>,
    faults: &mut Vec<Fault>,
) -> BTreeMap<(usize, usize), Said<'a>> {
    let mut found: BTreeMap<(usize, usize), Said<'a>> = BTreeMap::new();
    for route in routes {
        check::alone(&route.layer, faults);
        let source = sources.get(&*route.source).copied();
        if source.is_none() {
            let known = sources.keys().copied();
            let hint = check::hint_known(&route.source, known, "source", "add `[sources.NAME]`");
            faults.push(route.layer.fault("", format!("there is no source `{}`", route.source), hint));
        }
        let meant = handlers.meant(&route.handler);
        if meant.is_empty() {
            let names = handlers.all.iter().map(|one| format!("{}@{}", one.name, one.version)).collect::<Vec<_>>();
            let known = names.iter().map(String::as_str).chain(handlers.by_name.keys().copied());
            let hint = check::hint_known(&route.handler, known, "handler", "add `[handlers.NAME]`");
            faults.push(route.layer.fault("", format!("there is no handler `{}`", route.handler), hint));
        }
        let Some(source) = source else { continue };
        let is_general = split(&route.handler).1.is_none();
        for handler in meant {
            let said = found.entry((source, handler)).or_default();
            let place = if is_general { &mut said.general } else { &mut said.specific };
            if place.replace(&route.layer).is_some() {
                faults.push(route.layer.fault("", "it is there twice", "keep one of them"));
                break;
            }
        }
    }
    found
}

/// The route that the layers make; `None` where it cannot be one, and then it is told why.
fn route(
    id: RouteId,
    source: &SourceRules,
    handler: &OneVersion<'_>,
    layers: &Layers<'_>,
    faults: &mut Found,
) -> Option<Route> {
    let said = layers.0.iter().fold(Settings::default(), |before, layer| layer.settings.over(&before));
    let name: Arc<str> = format!("{}@{}", handler.name, handler.version).into();
    let namespace = said.namespace.as_ref().map_or("default", |namespace| namespace.as_str());
    // A wrong name was told where the handler is.
    let keys = Handler::within(namespace, handler.name, handler.version).ok()?;
    let Some(effect) = said.effect else {
        let kinds = Effect::ALL.map(|effect| format!("`{}`", effect.name())).join(", ");
        faults.add(
            &format!("{} × {name}", source.name),
            "nothing says what kind of effect it has".to_owned(),
            format!("set `effect` of the handler to one of {kinds}: it decides what can be promised"),
        );
        return None;
    };
    let policy = policy(effect, &said);
    let rate = said.rate.flatten().map(|rate| RateRules { rate, burst: said.rate_burst.unwrap_or(rate.burst()) });
    let failures = said.breaker_failures.unwrap_or(Some(check::BREAKER_FAILURES));
    let pause = said.breaker_pause.unwrap_or(check::BREAKER_PAUSE);
    Some(Route {
        id,
        source: Arc::clone(&source.name),
        handler: name,
        keys,
        visibility: source.visibility,
        policy,
        concurrency_max: said.concurrency_max.unwrap_or(check::CONCURRENCY_MAX),
        rate,
        breaker: failures.map(|failures| BreakerRules { failures, pause }),
        weight: said.weight.unwrap_or(1),
        store_away: said.store_away.unwrap_or(StoreAway::Closed),
        without_key: said.without_key.unwrap_or_default(),
    })
}

fn policy(effect: Effect, said: &Settings) -> Policy {
    let of = Policy::new(effect);
    let backoff = Backoff {
        delay_min: said.backoff_min.unwrap_or(of.backoff.delay_min),
        delay_max: said.backoff_max.unwrap_or(of.backoff.delay_max),
        factor: said.backoff_factor.unwrap_or(of.backoff.factor),
    };
    Policy {
        lease: said.lease.unwrap_or(of.lease),
        run_max: said.run_max.unwrap_or(of.run_max),
        attempts_max: said.attempts_max.unwrap_or(of.attempts_max),
        permanent_attempts_max: said.permanent_attempts_max.unwrap_or(of.permanent_attempts_max),
        poison_attempts_max: said.poison_attempts_max.unwrap_or(of.poison_attempts_max),
        crashes_max: said.crashes_max.unwrap_or(of.crashes_max),
        backoff,
        retention: said.retention.unwrap_or(of.retention),
        output_retention: said.output_retention.unwrap_or(of.output_retention),
        output_max: said.output_max.unwrap_or(of.output_max),
        store_may_forget: said.store_may_forget.unwrap_or(of.store_may_forget),
        ..of
    }
}

/// Sources and handlers that no route is about: something was forgotten, or is left over.
fn unserved(
    table: &RoutesBuilder,
    found: &BTreeMap<(usize, usize), Said<'_>>,
    handlers: &Handlers<'_>,
    warnings: &mut Vec<Fault>,
) {
    let sources: HashSet<usize> = found.keys().map(|(source, _)| *source).collect();
    for (at, (rules, layer)) in table.sources.iter().enumerate() {
        if !sources.contains(&at) {
            let hint = format!("add `[routes.{}.HANDLER]`, or remove the source", key(&rules.name));
            warnings.push(layer.fault("", "no handler serves it", hint));
        }
    }
    let served: HashSet<usize> = found.keys().map(|(_, handler)| *handler).collect();
    for (at, one) in handlers.all.iter().enumerate() {
        if let (false, Some(layer)) = (served.contains(&at), one.specific.or(one.general)) {
            let hint = format!("add `[routes.SOURCE.{}]`, or remove the handler", key(one.name));
            warnings.push(layer.fault("", "it serves no source", hint));
        }
    }
}
