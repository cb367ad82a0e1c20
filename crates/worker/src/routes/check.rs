//! What contradicts itself in a table, and what is allowed but does not fit: each with where it was said and what to do.

use std::collections::HashMap;
use std::time::Duration;

use taskonce_core::policy::{DURATION_MAX, Effect, LEASE_ADVISED_MIN, LEASE_MIN, OUTPUT_LIMIT};
use taskonce_core::units::{spell, spell_size, written};

use super::builder::{Layer, RoutesBuilder};
use super::{CommandRules, Fault, Route, Routes, Settings, SourceRules, StoreAway};

/// Defaults that no policy has; `settings` says them.
pub(super) const CONCURRENCY_MAX: u32 = 16;
pub(super) const BREAKER_FAILURES: u32 = 20;
pub(super) const BREAKER_PAUSE: Duration = Duration::from_secs(30);

/// The largest weight of a route.
const WEIGHT_MAX: u32 = 1000;
/// A broker that gives up by itself should do so far later than the route: after so many times its attempts.
const DELIVERIES_PER_ATTEMPT: u32 = 10;
/// A visibility timeout of so many leases makes a killed worker's task wait that long.
const VISIBILITY_PER_LEASE: u32 = 4;
const DAY: Duration = Duration::from_secs(86_400);
/// The most routes that one fault names.
const NAMED_MAX: usize = 3;

/// The layers of one route, the more special ones later.
pub(super) struct Layers<'a>(pub(super) Vec<&'a Layer>);

impl Layers<'_> {
    /// Where a setting was said, for the end of a phrase.
    fn place(&self, setting: &str) -> String {
        let said = self.0.iter().rev().find(|layer| layer.settings.names().contains(&setting));
        match said {
            None => "the default".to_owned(),
            Some(layer) => {
                layer.lines.get(setting).map_or_else(|| layer.subject.clone(), |line| format!("line {line}"))
            }
        }
    }

    fn is_said(&self, setting: &str) -> bool {
        self.0.iter().any(|layer| layer.settings.names().contains(&setting))
    }

    /// `lease 30s (line 4)`.
    fn value(&self, setting: &str, value: impl std::fmt::Display) -> String {
        format!("`{setting}` {value} ({})", self.place(setting))
    }

    fn time(&self, setting: &str, value: Duration) -> String {
        self.value(setting, written(value))
    }
}

/// Faults of routes. One that many routes inherit is told once.
#[derive(Default)]
pub(super) struct Found {
    order: Vec<(String, String)>,
    routes: HashMap<(String, String), Vec<String>>,
}

impl Found {
    pub(super) fn add(&mut self, route: &str, text: String, hint: String) {
        let what = (text, hint);
        if !self.routes.contains_key(&what) {
            self.order.push(what.clone());
        }
        self.routes.entry(what).or_default().push(route.to_owned());
    }

    pub(super) fn into_faults(mut self) -> Vec<Fault> {
        let of = |what: (String, String)| {
            let routes = self.routes.remove(&what).unwrap_or_default();
            let named = routes.iter().take(NAMED_MAX).cloned().collect::<Vec<_>>().join(", ");
            let subject = match routes.len() {
                1 => format!("route {named}"),
                count if count <= NAMED_MAX => format!("routes {named}"),
                count => format!("routes {named} and {} more", count - NAMED_MAX),
            };
            Fault { line: None, subject, text: what.0, hint: what.1 }
        };
        self.order.into_iter().map(of).collect()
    }
}

/// What is wrong with one layer, whatever the others say.
pub(super) fn alone(layer: &Layer, faults: &mut Vec<Fault>) {
    let mut fault = |setting: &str, text: String, hint: &str| faults.push(layer.fault(setting, text, hint));
    let said = &layer.settings;
    let Settings { lease, retention, output_retention, backoff_min, backoff_max, breaker_pause, .. } = said;
    if let Some(lease) = lease.filter(|lease| *lease < LEASE_MIN) {
        let text = format!("`lease` is {}; at least {} is needed", written(lease), written(LEASE_MIN));
        fault("lease", text, "raise it: it has to outlast every pause of a worker, 30s is usual");
    }
    let durations = [
        ("lease", *lease),
        ("retention", *retention),
        ("output_retention", *output_retention),
        ("backoff_min", *backoff_min),
        ("backoff_max", *backoff_max),
        ("breaker_pause", *breaker_pause),
        ("run_max", said.run_max.flatten()),
    ];
    for (name, duration) in durations {
        if duration.is_some_and(|duration| duration > DURATION_MAX) {
            fault(name, format!("`{name}` is above 100 years"), "lower it");
        }
    }
    if said.run_max == Some(Some(Duration::ZERO)) {
        fault(
            "run_max",
            "`run_max` is zero: no handler could run".to_owned(),
            "raise it, or say `\"none\"` for no limit",
        );
    }
    if said.breaker_pause == Some(Duration::ZERO) {
        let hint = "raise it, or say `breaker_failures = \"none\"` for no breaker";
        fault("breaker_pause", "`breaker_pause` is zero: nothing would be paused".to_owned(), hint);
    }
    let counts = [
        ("attempts_max", said.attempts_max, "say 1 for a single attempt: the first run is one"),
        ("permanent_attempts_max", said.permanent_attempts_max, "say 1 for a single attempt: the first run is one"),
        ("poison_attempts_max", said.poison_attempts_max.flatten(), "say 1 for a single attempt: the first run is one"),
        ("crashes_max", said.crashes_max, "say 1: the task is parked when it reaches it"),
        ("concurrency_max", said.concurrency_max, "say at least 1, or remove the route"),
        ("rate_burst", said.rate_burst, "say at least 1"),
        ("breaker_failures", said.breaker_failures.flatten(), "say at least 1, or `\"none\"` for no breaker"),
        ("weight", said.weight, "say at least 1"),
    ];
    for (name, _, hint) in counts.into_iter().filter(|(_, count, _)| *count == Some(0)) {
        fault(name, format!("`{name}` is 0"), hint);
    }
    if said.weight.is_some_and(|weight| weight > WEIGHT_MAX) {
        let text = format!("`weight` is above {WEIGHT_MAX}: others would wait for long rounds");
        fault("weight", text, "lower all weights; only their ratio counts");
    }
    if let Some(rate) = said.rate.flatten().filter(|rate| rate.starts == 0 || rate.per.is_zero()) {
        fault(
            "rate",
            format!("`rate` is {rate}: nothing would ever start"),
            "raise it, or say `\"none\"` for no limit",
        );
    }
    if let Some(factor) = said.backoff_factor.filter(|factor| !factor.is_finite() || *factor < 1.0) {
        let text = format!("`backoff_factor` is {factor}; at least 1 is needed");
        fault("backoff_factor", text, "say 2 to double the delay each time, 1 to keep it");
    }
    if said.output_max.is_some_and(|max| max > OUTPUT_LIMIT) {
        let text = format!("`output_max` is above {}", spell_size(OUTPUT_LIMIT as u64));
        fault("output_max", text, "keep large outputs elsewhere, and return where they are");
    }
}

/// What is wrong with what is said of a source.
pub(super) fn source(rules: &SourceRules, layer: &Layer, faults: &mut Vec<Fault>) {
    let share = rules.retry_share;
    if !(share > 0.0 && share <= 1.0) {
        let text = format!("`retry_share` is {share}; it is more than 0 and at most 1");
        faults.push(layer.fault("retry_share", text, "say 0.2 for one retry among five starts, 1 for no limit"));
    }
    if rules.retry_floor.starts == 0 || rules.retry_floor.per.is_zero() {
        let text = format!("`retry_floor` is {}: where nothing new comes no retry would ever start", rules.retry_floor);
        faults.push(layer.fault("retry_floor", text, "say at least `1/h`"));
    }
    if rules.visibility == Some(Duration::ZERO) {
        let text = "`visibility` is zero: every delivery would come again at once";
        faults.push(layer.fault("visibility", text, "say what the broker is set to"));
    }
    if rules.deliveries_max == Some(0) {
        let hint = "say what the broker is set to, or leave it out where it never gives up";
        faults.push(layer.fault("deliveries_max", "`deliveries_max` is 0", hint));
    }
}

/// What is wrong with the URLs, as far as a look at them tells; what opens them says the rest.
pub(super) fn urls(table: &RoutesBuilder, faults: &mut Vec<Fault>) {
    let mut of: HashMap<&str, &str> = HashMap::new();
    let store = table.store.as_ref().map(|(url, _)| url);
    if let Some((store, line)) = &table.store {
        let layer = Layer { line: *line, ..Layer::default() };
        if !is_url(store) {
            faults.push(layer.fault("", "`store` is no URL", "write one, such as `store = \"sqlite:tasks.db\"`"));
        }
        of.insert(store, "the store");
    }
    for (rules, layer) in &table.sources {
        let Some(url) = &rules.url else { continue };
        if !is_url(url) {
            faults.push(layer.fault("url", "`url` is no URL", "write one, such as `url = \"sqlite:queue.db\"`"));
        }
        if let Some(named) = name_in(url).filter(|named| *named != &*rules.name) {
            let text = format!("`url` names it `{}`", named.escape_debug());
            faults.push(layer.fault("url", text, "leave `name=` out of the URL: the table's name is the source's"));
        }
        // Each opening of it is another.
        if url == "memory:" {
            continue;
        }
        if let Some(other) = of.insert(url, &rules.name) {
            let what = if Some(url) == store { other.to_owned() } else { format!("source {other}") };
            faults.push(layer.fault("url", format!("`url` is that of {what}"), "give each a place of its own"));
        }
    }
}

fn is_url(text: &str) -> bool {
    text.split_once(':').is_some_and(|(scheme, rest)| {
        !rest.is_empty() && scheme.starts_with(|first: char| first.is_ascii_alphabetic()) || text == "memory:"
    })
}

/// The name that a URL gives to its source.
fn name_in(url: &str) -> Option<&str> {
    url.split_once('?')?.1.split('&').find_map(|pair| pair.strip_prefix("name="))
}

/// What contradicts itself in a route.
pub(super) fn contradictions(route: &Route, source: &SourceRules, layers: &Layers<'_>, found: &mut Found) {
    let policy = &route.policy;
    let name = route.name();
    let mut fault = |text: String, hint: String| found.add(&name, text, hint);
    let retention = layers.time("retention", policy.retention);
    let below = [
        ("lease", Some(policy.lease), "a record would go while its claim holds"),
        ("run_max", policy.run_max, "a record would go while its handler runs"),
        ("backoff_max", Some(policy.backoff.delay_max), "a record would go while its task waits"),
    ];
    for (setting, value, why) in below {
        if let Some(value) = value.filter(|value| policy.retention < *value) {
            let text = format!("{retention} is below {}: {why}", layers.time(setting, value));
            fault(text, format!("raise `retention`, or lower `{setting}`"));
        }
    }
    let broker = [("visibility", source.visibility), ("redelivery_max", source.redelivery_max)];
    let longest = broker.into_iter().filter_map(|(setting, value)| Some((value?, setting))).max();
    if let Some((value, setting)) = longest.filter(|(value, _)| policy.retention < *value) {
        let text = format!(
            "{retention} is below `{setting}` {} of source {}: a copy could come when the record is gone, and run again",
            written(value),
            source.name
        );
        fault(text, format!("raise `retention` to at least {}", written(advised_retention(route, source))));
    }
    if policy.backoff.delay_min > policy.backoff.delay_max {
        let min = layers.time("backoff_min", policy.backoff.delay_min);
        let max = layers.time("backoff_max", policy.backoff.delay_max);
        fault(format!("{min} is above {max}"), "set both, the first delay's bound and that of every delay".to_owned());
    }
    let of_classes = [
        ("permanent_attempts_max", Some(policy.permanent_attempts_max)),
        ("poison_attempts_max", policy.poison_attempts_max),
    ];
    for (setting, value) in of_classes {
        if let Some(value) = value.filter(|value| *value > policy.attempts_max) {
            let attempts = layers.value("attempts_max", policy.attempts_max);
            let text = format!("{} is above {attempts}, and never reached", layers.value(setting, value));
            fault(text, format!("lower `{setting}`, or raise `attempts_max`"));
        }
    }
    if let Some(deliveries) = source.deliveries_max.filter(|deliveries| *deliveries <= policy.attempts_max) {
        let attempts = layers.value("attempts_max", policy.attempts_max);
        let text = format!(
            "source {} gives up after {deliveries} deliveries, before {attempts} are made; deliveries of a busy task count too",
            source.name
        );
        let advised = policy.attempts_max.saturating_mul(DELIVERIES_PER_ATTEMPT);
        fault(text, format!("raise the broker's limit to {advised} or more, and say so in `deliveries_max`"));
    }
    let needs_record = match policy.effect {
        Effect::Transactional => Some("it is written in the transaction that completes the record"),
        Effect::Unrepeatable => Some("only the record keeps a duplicate from repeating it"),
        Effect::Fenced => Some("the fencing token comes from the record"),
        Effect::Keyed | Effect::Repeatable => None,
    };
    if let (StoreAway::Open, Some(why)) = (route.store_away, needs_record) {
        let effect = layers.value("effect", policy.effect.name());
        let text = format!("{} cannot be with {effect}: {why}", layers.value("store_away", "open"));
        fault(text, "say `store_away = \"closed\"`: its deliveries wait until the store is back".to_owned());
    }
}

/// What is allowed, but does not fit.
pub(super) fn warnings(route: &Route, source: &SourceRules, layers: &Layers<'_>, found: &mut Found) {
    let policy = &route.policy;
    let name = route.name();
    let lease = layers.time("lease", policy.lease);
    let mut warning = |text: String, hint: String| found.add(&name, text, hint);
    if policy.lease < LEASE_ADVISED_MIN {
        let text = format!("{lease} is below {}: a pause of the machine may lose it", written(LEASE_ADVISED_MIN));
        warning(text, "size it by pauses, not by the work: heartbeats keep it while the handler runs".to_owned());
    }
    if let Some(run_max) = policy.run_max.filter(|run_max| *run_max < policy.lease && policy.lease > LEASE_ADVISED_MIN)
    {
        let run_max = layers.time("run_max", run_max);
        let text = format!("{lease} is above {run_max}: a killed worker's task waits longer than any run lasts");
        warning(text, format!("a lease between {} and `run_max` is enough", written(LEASE_ADVISED_MIN)));
    }
    if let (None, Some(poison)) = (policy.run_max, policy.poison_attempts_max) {
        let poison = layers.value("poison_attempts_max", poison);
        let text = format!("{poison} says nothing without `run_max`: no handler ever runs too long");
        warning(text, "set `run_max`, far above the longest run that is right".to_owned());
    }
    if route.rate.is_none() && layers.is_said("rate_burst") {
        let text = format!("`rate_burst` ({}) says nothing without `rate`", layers.place("rate_burst"));
        warning(text, "set `rate`".to_owned());
    }
    if let Some(visibility) = source.visibility {
        visibility_warnings(route, &lease, visibility, &mut warning);
    }
    let advised = advised_retention(route, source);
    if policy.retention < advised {
        let text = format!(
            "{} is below {}: copies, dead letters and the longest run together",
            layers.time("retention", policy.retention),
            written(advised)
        );
        warning(text, format!("raise `retention` to {}", written(advised)));
    }
    let delays = route.times().delays_max;
    if let Some(redelivery) = source.redelivery_max.filter(|redelivery| *redelivery < delays) {
        let text = format!(
            "its attempts may take {} in all, and source {} forgets what was sent after {}",
            spell(delays),
            source.name,
            written(redelivery)
        );
        warning(text, "lower `attempts_max` or `backoff_max`, or raise the broker's retention".to_owned());
    }
    let advised = policy.attempts_max.saturating_mul(DELIVERIES_PER_ATTEMPT);
    if let Some(deliveries) = source.deliveries_max.filter(|max| *max > policy.attempts_max && *max < advised) {
        let text = format!(
            "source {} gives up after {deliveries} deliveries; deliveries of a busy task count too, and {} are made",
            source.name,
            layers.value("attempts_max", policy.attempts_max)
        );
        warning(text, format!("raise the broker's limit to {advised} or more, and say so in `deliveries_max`"));
    }
}

/// What does not fit between a route and the command of its handler.
pub(super) fn command_warnings(route: &Route, rules: &CommandRules, layers: &Layers<'_>, found: &mut Found) {
    if let Some(run_max) = route.policy.run_max.filter(|run_max| *run_max <= rules.kill_after) {
        let run_max = layers.time("run_max", run_max);
        let text = format!(
            "`kill_after` {} is not below {run_max}: an attempt may spend its time waiting for the end of the one before",
            written(rules.kill_after)
        );
        found.add(&route.name(), text, "lower `kill_after`, or raise `run_max`".to_owned());
    }
}

fn visibility_warnings(route: &Route, lease: &str, visibility: Duration, warning: &mut impl FnMut(String, String)) {
    let policy = &route.policy;
    let source = &route.source;
    if visibility < policy.lease / 2 {
        let text = format!(
            "`visibility` {} of source {source} is below half of {lease}: a pause that the lease outlasts brings running tasks again",
            written(visibility)
        );
        warning(text, "make both about the same; what comes again is deferred as busy".to_owned());
    }
    if visibility > policy.lease.saturating_mul(VISIBILITY_PER_LEASE) {
        let text = format!(
            "`visibility` {} of source {source} is far above {lease}: a killed worker's task waits for it",
            written(visibility)
        );
        warning(text, "make both about the same".to_owned());
    }
    if policy.retention < visibility {
        let text = format!("`retention` {} is below `visibility` {}", written(policy.retention), written(visibility));
        warning(text, "raise `retention`: a copy could come when the record is gone, and run again".to_owned());
    }
}

/// What does not fit between the table and a source whose visibility timeout is known only now.
pub(super) fn warnings_for(routes: &Routes, source: &str, visibility: Duration) -> Vec<Fault> {
    let mut found = Found::default();
    let Some(rules) = routes.source(source) else { return Vec::new() };
    if rules.visibility.is_some_and(|said| said == visibility) {
        return Vec::new();
    }
    for route in routes.of_source(source) {
        let name = route.name();
        let lease = format!("`lease` {}", written(route.policy.lease));
        visibility_warnings(route, &lease, visibility, &mut |text, hint| found.add(&name, text, hint));
    }
    let mut faults = found.into_faults();
    if let Some(said) = rules.visibility {
        faults.insert(
            0,
            Fault {
                line: None,
                subject: format!("source {source}"),
                text: format!("`visibility` is said to be {}, and is {}", written(said), written(visibility)),
                hint: "say what the source is opened with".to_owned(),
            },
        );
    }
    faults
}

/// Redelivery, the dwell of dead letters and the longest run, together; beyond a day in whole days.
fn advised_retention(route: &Route, source: &SourceRules) -> Duration {
    let parts = [source.redelivery_max, source.dead_letters_for, route.policy.run_max];
    let sum = parts.into_iter().flatten().fold(Duration::ZERO, Duration::saturating_add);
    let sum = sum.max(source.visibility.unwrap_or_default());
    if sum <= DAY { sum } else { DAY * u32::try_from(sum.as_secs().div_ceil(DAY.as_secs())).unwrap_or(u32::MAX) }
}

/// What to do about a name that is not there: the nearest one that is, or how to add it.
pub(super) fn hint_known<'a>(name: &str, known: impl Iterator<Item = &'a str>, what: &str, otherwise: &str) -> String {
    match nearest(name, known) {
        Some(near) => format!("there is a {what} `{near}`; else {otherwise}"),
        None => format!("{otherwise}, or correct the name"),
    }
}

/// The known name that differs by the fewest letters, by at most a third of them.
pub(super) fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let far = name.chars().count().div_ceil(3);
    known.map(|known| (distance(name, known), known)).filter(|(off, _)| *off <= far).min().map(|(_, known)| known)
}

/// How many letters must be put in, taken out or changed. Source: V. Levenshtein, 1966.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (at, one) in a.chars().enumerate() {
        let mut corner = row[0];
        row[0] = at + 1;
        for (place, other) in b.iter().enumerate() {
            let changed = corner + usize::from(one != *other);
            corner = row[place + 1];
            row[place + 1] = changed.min(row[place] + 1).min(corner + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effects_that_need_the_record_never_run_without_it() {
        for effect in Effect::ALL {
            let open = Settings { effect: Some(effect), store_away: Some(StoreAway::Open), ..Settings::default() };
            let built = Routes::builder()
                .source(SourceRules::new("orders"), Settings::default())
                .handler("charge", open)
                .route("orders", "charge", Settings::default())
                .build();
            let allowed = matches!(effect, Effect::Keyed | Effect::Repeatable);
            assert_eq!(built.is_ok(), allowed, "{effect:?}");
        }
    }

    #[test]
    fn the_nearest_name_is_found_unless_it_is_far() {
        let known = || ["lease", "retention", "attempts_max", "weight"].into_iter();
        assert_eq!(nearest("leese", known()), Some("lease"));
        assert_eq!(nearest("max_attempts", known()), None);
        assert_eq!(nearest("attempt_max", known()), Some("attempts_max"));
        assert_eq!((distance("", "abc"), distance("kitten", "sitting")), (3, 3));
    }
}
