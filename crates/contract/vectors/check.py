#!/usr/bin/env python3
"""A second implementation of the rules in README.md, with Python's own library only. Checks keys.json and jcs/."""

import decimal
import hashlib
import json
import re
import sys
import unicodedata
import uuid
from pathlib import Path

DEPTH_MAX = 128


class Refused(Exception):
    def __init__(self, kind, path=None):
        super().__init__(kind, path)
        self.kind, self.path = kind, path


class Integer(str):
    """An integer literal."""


class Double(str):
    """Any other number literal."""


class Members(list):
    """An object, as pairs: a dict would hide a name given twice."""


def no_constant(_):
    raise Refused("bad_json")


def read(raw):
    try:
        return json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=Members,
            parse_int=Integer,
            parse_float=Double,
            parse_constant=no_constant,
        )
    except ValueError as error:
        raise Refused("bad_json") from error


def token(name):
    return "/" + name.replace("~", "~0").replace("/", "~1")


def string(text, path):
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Refused("lone_surrogate", path) from error
    short = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}
    return '"' + "".join(short.get(c) or (f"\\u{ord(c):04x}" if c < " " else c) for c in text) + '"'


def double(literal, path):
    """ECMAScript's Number::toString; Python finds the same shortest digits."""
    value = float(literal)
    if value in (float("inf"), float("-inf")):
        raise Refused("not_finite", path)
    if value == 0:
        return "0"
    sign, digits, exponent = decimal.Decimal(repr(value)).as_tuple()
    text = "".join(map(str, digits)).rstrip("0")
    point = len(digits) + exponent
    if len(text) <= point <= 21:
        text += "0" * (point - len(text))
    elif 0 < point <= 21:
        text = text[:point] + "." + text[point:]
    elif -6 < point <= 0:
        text = "0." + "0" * -point + text
    else:
        text = text[0] + ("." + text[1:] if len(text) > 1 else "") + f"e{point - 1:+d}"
    return "-" * sign + text


def canonical(value, path="", depth=0):
    if isinstance(value, list):
        depth += 1
        if depth > DEPTH_MAX:
            raise Refused("too_deep", path)
    if isinstance(value, Members):
        seen, members = set(), []
        for name, member in value:
            text = string(name, path)
            if name in seen:
                raise Refused("duplicate_name", path + token(name))
            seen.add(name)
            members.append((name.encode("utf-16-be"), text + ":" + canonical(member, path + token(name), depth)))
        return "{" + ",".join(text for _, text in sorted(members)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(canonical(item, f"{path}/{index}", depth) for index, item in enumerate(value)) + "]"
    if isinstance(value, Integer):
        number = int(value)
        if not -(2**63) <= number < 2**64:
            raise Refused("integer_range", path)
        return str(number)
    if isinstance(value, Double):
        return double(value, path)
    if isinstance(value, str):
        return string(value, path)
    return {None: "null", True: "true", False: "false"}[value]


def find(value, pointer):
    """What a pointer names, as a list of one, or of none."""
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Members) and part in dict(value):
            value = dict(value)[part]
        elif type(value) is list and re.fullmatch("0|[1-9][0-9]*", part) and int(part) < len(value):
            value = value[int(part)]
        else:
            return []
    return [value]


def chosen(document, fields):
    whole = canonical(document)
    if fields is None:
        return whole
    required, optional = fields.get("required", []), fields.get("optional", [])
    pointers = required + optional
    if len(set(pointers)) < len(pointers) or not all(re.fullmatch("(/([^~/]|~[01])*)*", p) for p in pointers):
        raise Refused("bad_pointer")
    members = Members()
    for pointer in pointers:
        found = find(document, pointer)
        if not found and pointer in required:
            raise Refused("pointer_missing", pointer)
        members += [(pointer, value) for value in found]
    if not members:
        raise Refused("nothing_chosen")
    # The depth limit is one of the document; the object around the fields is not counted.
    return canonical(members, depth=-1)


def check_name(name, longest):
    if not re.fullmatch(f"[A-Za-z0-9._-]{{1,{longest}}}", name):
        raise Refused("bad_name")


def text_form(namespace, handler, version, id):
    check_name(namespace, 64)
    check_name(handler, 64)
    check_name(version, 32)
    if not 1 <= len(id.encode("utf-8")) <= 256 or any(unicodedata.category(c) == "Cc" for c in id):
        raise Refused("bad_id")
    return f"{namespace}/{handler}@{version}/{id}"


def parse_text_form(text):
    parts = re.fullmatch("([^/]*)/([^@]*)@([^/]*)/(.*)", text, re.DOTALL)
    if not parts:
        raise Refused("bad_key")
    text_form(*parts.groups())
    return dict(zip(("namespace", "handler", "version", "id"), parts.groups()))


def downstream(key, step):
    raw = bytearray(hashlib.sha256(key.encode("utf-8") + b"\0" + step.encode("utf-8")).digest()[:16])
    raw[6] = raw[6] & 0x0F | 0x80
    raw[8] = raw[8] & 0x3F | 0x80
    return str(uuid.UUID(bytes=bytes(raw)))


def derive(vector):
    raw = bytes.fromhex(vector["input_hex"]) if "input_hex" in vector else vector["input"].encode("utf-8")
    form = chosen(read(raw), vector.get("fields"))
    digest = hashlib.sha256(form.encode("utf-8")).hexdigest()
    id = vector.get("given_id", digest[:40])
    names = vector["handler"]
    key = text_form(names["namespace"], names["handler"], names["version"], id)
    steps = {step: downstream(key, step) for step in vector.get("steps", [""])}
    return {"canonical": form, "sha256": digest, "id": id, "fingerprint": digest[:32], "key": key, "downstream": steps}


def answer(function, argument):
    try:
        return function(argument)
    except Refused as refused:
        place = {} if refused.path is None else {"path": refused.path}
        return {"error": refused.kind} | place


def main():
    here = Path(__file__).parent
    vectors = json.loads((here / "keys.json").read_text("utf-8"))
    faults = 0
    cases = [(v, answer(derive, v)) for v in vectors["keys"]]
    cases += [(v, answer(parse_text_form, v["text"])) for v in vectors["text_forms"]]
    for vector, got in cases:
        if got != vector["expect"]:
            faults += 1
            print(f"{vector['name']}: expected {vector['expect']}, got {got}")
    for given in sorted(here.glob("jcs/*.input.json")):
        expected = Path(str(given).replace(".input.", ".output.")).read_bytes()
        if canonical(read(given.read_bytes())).encode("utf-8") != expected:
            faults += 1
            print(f"{given.name}: not canonical")
    print(f"{len(cases)} vectors, {faults} faults")
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
