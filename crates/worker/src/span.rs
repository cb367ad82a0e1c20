//! The trace that a task belongs to: what came in its header `traceparent`, the span of its run, and what its handler hands on.
//!
//! A trace context is that of W3C Trace Context, level 1. It is handed on as it came, with the run as the parent; where none came,
//! none is made up.

use std::fmt;
use std::sync::Arc;

use taskonce_core::host::Host;
use tracing::Instrument as _;

use crate::source::{Delivery, TRACE_HEADER};

tokio::task_local! {
    static CURRENT: Current;
}

/// What runs here.
struct Current {
    /// What it hands on.
    traceparent: Option<Arc<str>>,
    span: tracing::Span,
}

/// The `traceparent` for what is called or sent from here: in the trace of the task whose handler runs here, with its run as
/// the parent. `None` outside of a handler that a worker runs, in what it spawned, and where the task came without a trace.
#[must_use]
pub fn current() -> Option<String> {
    CURRENT.try_with(|current| current.traceparent.as_deref().map(str::to_owned)).ok().flatten()
}

/// Runs a delivery's future in a span of its own, in which [`current`] knows its trace.
pub(crate) async fn within<F: Future>(delivery: &Delivery, host: &dyn Host, future: F) -> F::Output {
    let trace = delivery.envelope.header(TRACE_HEADER).and_then(|text| Trace::begun(text, host.random()));
    let span = tracing::info_span!(
        "task",
        source = &*delivery.source,
        handler = %delivery.envelope.handler.escape_debug(),
        key = tracing::field::Empty,
        number = delivery.number,
        trace_id = trace.as_ref().map(|trace| &*trace.id),
        parent_id = trace.as_ref().map(|trace| &*trace.parent),
        span_id = trace.as_ref().map(|trace| tracing::field::display(Hex(trace.span))),
    );
    let traceparent = trace.map(|trace| trace.to_string().into());
    CURRENT.scope(Current { traceparent, span: span.clone() }, future).instrument(span).await
}

/// Says which task the span is of, once that is known.
pub(crate) fn is_of(key: &dyn fmt::Display) {
    // Outside of a delivery there is no span to say it of.
    let _none = CURRENT.try_with(|current| {
        current.span.record("key", tracing::field::display(key));
    });
}

/// A run in a trace.
struct Trace {
    id: String,
    /// What sent it.
    parent: String,
    /// Its own.
    span: u64,
    flags: String,
}

impl Trace {
    /// A run that begins in the trace of this `traceparent`; `None` where it is none. What a later version of the standard
    /// adds behind the flags is left out.
    fn begun(text: &str, random: u128) -> Option<Trace> {
        let mut parts = text.trim().split('-');
        let (version, id, parent, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let is_hex = |text: &str, len: usize| {
            text.len() == len && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
        };
        let is_none = |text: &str| text.bytes().all(|byte| byte == b'0');
        let is_whole = is_hex(version, 2) && is_hex(id, 32) && is_hex(parent, 16) && is_hex(flags, 2);
        if !is_whole || version == "ff" || is_none(id) || is_none(parent) {
            return None;
        }
        if version == "00" && parts.next().is_some() {
            return None;
        }
        // A span's id is not zero.
        let span = (random as u64).max(1);
        Some(Trace { id: id.to_owned(), parent: parent.to_owned(), span, flags: flags.to_owned() })
    }
}

/// The `traceparent` of what it calls.
impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{}-{}-{}", self.id, Hex(self.span), self.flags)
    }
}

struct Hex(u64);

impl fmt::Display for Hex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::fmt::Debug;
    use std::sync::Mutex;

    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};

    use super::*;
    use crate::clock::SystemHost;
    use crate::events::Event;
    use crate::source::{Envelope, Receipt};

    /// Collects the fields of spans and events.
    #[derive(Clone, Default)]
    struct Seen(Arc<Mutex<HashMap<String, String>>>);

    struct Fields<'a>(&'a Seen, &'static str);

    impl Visit for Fields<'_> {
        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            let name = format!("{}.{}", self.1, field.name());
            self.0.0.lock().unwrap().insert(name, format!("{value:?}").trim_matches('"').to_owned());
        }
    }

    impl tracing::Subscriber for Seen {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, span: &Attributes<'_>) -> Id {
            span.record(&mut Fields(self, span.metadata().name()));
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, values: &Record<'_>) {
            values.record(&mut Fields(self, "task"));
        }
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, event: &tracing::Event<'_>) {
            event.record(&mut Fields(self, "event"));
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    const GIVEN: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[tokio::test]
    async fn a_deliverys_span_says_its_task_and_its_parent_and_its_events_lie_in_it() {
        let seen = Seen::default();
        let subscriber = tracing::subscriber::set_default(seen.clone());
        let delivery = Delivery {
            source: "orders".into(),
            envelope: Envelope {
                headers: vec![("traceparent".into(), GIVEN.into())],
                ..Envelope::new("charge@2", *b"x")
            },
            number: 2,
            coordinates: "a-1".into(),
            redriven_at: None,
            receipt: Receipt("1".into()),
        };
        let handed_on = within(&delivery, &SystemHost::new(), async {
            is_of(&"shop/charge@2/a");
            Event::Redriven.log(&"shop/charge@2/a");
            current().unwrap()
        })
        .await;
        drop(subscriber);
        let fields = seen.0.lock().unwrap();
        for (name, value) in [
            ("task.source", "orders"),
            ("task.handler", "charge@2"),
            ("task.key", "shop/charge@2/a"),
            ("task.number", "2"),
            ("task.trace_id", "4bf92f3577b34da6a3ce929d0e0e4736"),
            ("task.parent_id", "00f067aa0ba902b7"),
            ("event.event", "redriven"),
        ] {
            assert_eq!(fields.get(name).map(String::as_str), Some(value), "{name}: {fields:?}");
        }
        assert_eq!(handed_on, format!("00-{}-{}-01", fields["task.trace_id"], fields["task.span_id"]));
        assert!(!format!("{fields:?}").contains("payload"), "{fields:?}");
        assert_eq!(current(), None, "outside of it there is none");
    }

    #[test]
    fn a_run_stays_in_the_trace_and_is_the_parent_of_what_it_calls() {
        let run = Trace::begun(GIVEN, 0xabc).unwrap();
        assert_eq!(run.parent, "00f067aa0ba902b7");
        assert_eq!(run.to_string(), "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000abc-01");
        let later = format!("01{}-more", &GIVEN[2..]);
        assert_eq!(Trace::begun(&later, 0).unwrap().to_string(), format!("{}0000000000000001-01", &GIVEN[..36]));
    }

    #[test]
    fn what_is_no_trace_context_is_none() {
        for text in [
            "",
            "00",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
        ] {
            assert!(Trace::begun(text, 1).is_none(), "{text}");
        }
    }
}
