//! Which task a delivery brings, by its route: its key, or what the route says of deliveries without one.

use taskonce_core::error::{Error, ErrorKind, Result};
use taskonce_core::json::Input;
use taskonce_core::key::{Fingerprint, Key, Task};

use super::{Route, WithoutKey};
use crate::source::{Delivery, Envelope, FINGERPRINT_HEADER};

impl Route {
    /// The task that a delivery brings.
    ///
    /// * Its key is `namespace/handler@version/id` of this route's handler, or, by a producer that knows nothing of that, an id.
    /// * The fingerprint of a key that was given is that of the whole payload: its canonical JSON, and where the content type
    ///   says that it is none, its bytes. That of a derived key is of the fields that made it; where its sender derived it, it
    ///   says so in the header [`FINGERPRINT_HEADER`].
    ///
    /// # Errors
    /// [`ErrorKind::BadKey`] where the key is another handler's, or is missing and the route refuses that;
    /// [`ErrorKind::BadId`]; and what [`Input::from_json`] refuses. None of them passes: the delivery is a dead letter.
    pub fn task(&self, delivery: &Delivery) -> Result<Task> {
        let envelope = &delivery.envelope;
        match (&envelope.key, &self.without_key) {
            (Some(text), _) => self.given(self.key(text)?, envelope),
            (None, WithoutKey::Coordinates) => self.given(self.keys.key(&delivery.coordinates)?, envelope),
            (None, WithoutKey::Derive(fields)) => self.keys.task_from(&Input::from_json(&envelope.payload)?, fields),
            (None, WithoutKey::Refuse) => Err(Error::new(ErrorKind::BadKey, "the delivery has no key")
                .about(format!("route {}", self.name()))
                .with_hint("let its producer send `Idempotency-Key`, or set `without_key` of the route")),
        }
    }

    fn given(&self, key: Key, envelope: &Envelope) -> Result<Task> {
        let fingerprint = if let Some(text) = envelope.header(FINGERPRINT_HEADER) {
            carried(text)?
        } else if is_json(envelope.content_type.as_deref()) {
            Input::from_json(&envelope.payload)?.fingerprint(&taskonce_core::json::Fields::all())?
        } else {
            Fingerprint::of_bytes(&envelope.payload)
        };
        Ok(Task { key, fingerprint })
    }

    fn key(&self, text: &str) -> Result<Key> {
        let Ok(key) = Key::parse(text) else { return self.keys.key(text) };
        let of = (key.namespace(), key.handler(), key.version());
        if of == (self.keys.namespace(), self.keys.handler(), self.keys.version()) {
            return Ok(key);
        }
        Err(Error::new(
            ErrorKind::BadKey,
            format!("the key is not one of `{}`, whose route the delivery came by", self.keys),
        )
        .about(format!("key `{}`", text.escape_debug()))
        .with_hint("see that the sender names the same handler in the key and in the envelope"))
    }
}

/// The fingerprint that a header says.
fn carried(text: &str) -> Result<Fingerprint> {
    let is_whole = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    match u128::from_str_radix(text, 16) {
        Ok(number) if is_whole => Ok(Fingerprint(number.to_be_bytes())),
        Ok(_) | Err(_) => Err(Error::new(ErrorKind::BadKey, "the fingerprint is not 32 digits of lower hex")
            .about(format!("header `{FINGERPRINT_HEADER}`"))
            .with_hint("leave the header out, or send what `taskonce key` prints as the fingerprint")),
    }
}

/// Whether a payload is JSON: unless its content type says otherwise.
pub(crate) fn is_json(content_type: Option<&str>) -> bool {
    let Some(content_type) = content_type else { return true };
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    essence.is_empty()
        || essence.eq_ignore_ascii_case("application/json")
        || essence.to_ascii_lowercase().ends_with("+json")
}

#[cfg(test)]
mod tests {
    use taskonce_core::json::Fields;
    use taskonce_core::policy::Effect;

    use super::*;
    use crate::routes::{Routes, Settings, SourceRules};
    use crate::source::Receipt;

    fn route(without_key: WithoutKey) -> Route {
        let settings = Settings {
            effect: Some(Effect::Keyed),
            namespace: Some(taskonce_core::key::Name::new("shop").unwrap()),
            without_key: Some(without_key),
            ..Settings::default()
        };
        let routes = Routes::builder()
            .source(SourceRules::new("orders"), Settings::default())
            .handler("charge@2", settings)
            .route("orders", "charge", Settings::default())
            .build()
            .unwrap();
        routes.find("orders", "charge@2").unwrap().clone()
    }

    fn delivery(key: Option<&str>, payload: &str) -> Delivery {
        Delivery {
            source: "orders".into(),
            envelope: Envelope { key: key.map(str::to_owned), ..Envelope::new("charge@2", payload) },
            number: 1,
            coordinates: "f3-17".into(),
            redriven_at: None,
            receipt: Receipt("1".into()),
        }
    }

    #[test]
    fn a_key_in_full_and_a_foreign_id_name_the_same_task() {
        let route = route(WithoutKey::Refuse);
        let full = route.task(&delivery(Some("shop/charge@2/a/b"), r#"{"a": 1.0}"#)).unwrap();
        let foreign = route.task(&delivery(Some("a/b"), r#"{"a":1}"#)).unwrap();
        assert_eq!((full.key.as_str(), full.fingerprint), (foreign.key.as_str(), foreign.fingerprint));
    }

    #[test]
    fn a_key_of_another_handler_is_refused() {
        for other in ["shop/charge@1/a", "shop/mail@2/a", "default/charge@2/a"] {
            let error = route(WithoutKey::Coordinates).task(&delivery(Some(other), "{}")).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::BadKey, "{error}");
        }
    }

    #[test]
    fn a_delivery_without_a_key_is_refused_named_by_its_broker_or_derived() {
        let bare = delivery(None, r#"{"order": {"id": 7}, "sent_at": 1}"#);
        assert_eq!(route(WithoutKey::Refuse).task(&bare).unwrap_err().kind(), ErrorKind::BadKey);
        assert_eq!(route(WithoutKey::Coordinates).task(&bare).unwrap().key.as_str(), "shop/charge@2/f3-17");
        let derives = route(WithoutKey::Derive(Fields::new(["/order/id"]).unwrap()));
        let again = delivery(None, r#"{"order": {"id": 7}, "sent_at": 2}"#);
        let (one, two) = (derives.task(&bare).unwrap(), derives.task(&again).unwrap());
        assert_eq!((one.key.as_str(), one.fingerprint), (two.key.as_str(), two.fingerprint));
        assert_eq!(derives.task(&delivery(None, "{}")).unwrap_err().kind(), ErrorKind::PointerMissing);
    }

    #[test]
    fn a_key_that_its_sender_derived_brings_its_fingerprint() {
        let route = route(WithoutKey::Refuse);
        let sent = |payload: &str, fingerprint: &str| {
            let mut delivery = delivery(Some("derived"), payload);
            delivery.envelope.headers = vec![("idempotency-fingerprint".into(), fingerprint.into())];
            route.task(&delivery).map(|task| task.fingerprint)
        };
        let (one, other) = ("0123456789abcdef0123456789abcdef", "f123456789abcdef0123456789abcdef");
        assert_eq!(sent(r#"{"a": 1}"#, one).unwrap().to_string(), one);
        assert_eq!(sent(r#"{"a": 1}"#, one).unwrap(), sent(r#"{"a": 2}"#, one).unwrap());
        assert_ne!(sent(r#"{"a": 1}"#, one).unwrap(), sent(r#"{"a": 1}"#, other).unwrap());
        for bad in ["", "12", &one.to_uppercase(), &format!("+{}", &one[1..])] {
            assert_eq!(sent("{}", bad).unwrap_err().kind(), ErrorKind::BadKey, "{bad}");
        }
    }

    #[test]
    fn what_is_no_json_by_its_content_type_is_told_apart_by_its_bytes() {
        let route = route(WithoutKey::Refuse);
        let of = |content_type: Option<&str>, payload: &str| {
            let mut delivery = delivery(Some("a"), payload);
            delivery.envelope.content_type = content_type.map(str::to_owned);
            route.task(&delivery).map(|task| task.fingerprint)
        };
        assert_eq!(of(None, "text").unwrap_err().kind(), ErrorKind::BadJson);
        assert_eq!(of(Some("application/vnd.a+json; v=1"), "text").unwrap_err().kind(), ErrorKind::BadJson);
        assert_ne!(of(Some("text/plain"), "1.0").unwrap(), of(Some("text/plain"), "1").unwrap());
        assert_eq!(of(Some("application/json"), "1.0").unwrap(), of(None, "1").unwrap());
    }
}
