"""Scripts with one deliberate fault each."""

from __future__ import annotations

from typing import NamedTuple

from lua.runner import COMMANDS

from idemguard.stores import scripts


class Fault(NamedTuple):
    """A passage of the scripts, and what stands there instead."""

    name: str
    old: str
    new: str = ""
    scripts: tuple[str, ...] = COMMANDS  # those that have the passage, once each; of all, some
    moving: bool = False  # seen while a slot moves
    crowded: bool = False  # seen where a record has more executions than it remembers


def texts(fault: Fault) -> dict[str, str]:
    """The scripts with the fault in them.

    Raises:
        LookupError: the passage does not stand there once.

    """
    changed = {}
    for name in COMMANDS:
        text = scripts.script(name).text
        if text.count(fault.old) > (name in fault.scripts):
            raise LookupError(f"{fault.name}: {text.count(fault.old)} times in {name}")
        if fault.old in text:
            changed[name] = text.replace(fault.old, fault.new)
    if not changed or (fault.scripts is not COMMANDS and changed.keys() != set(fault.scripts)):
        raise LookupError(f"{fault.name}: only in {', '.join(changed)}")
    return changed


_BEGIN, _WITHDRAW = ("begin",), ("withdraw",)
_ADD = "math.max(record.token + 1, now)"

FAULTS = (
    Fault("the token is the clock", _ADD, "now", ("begin", "resolve")),
    Fault("the token is counted alone", _ADD, "record.token + 1", ("begin", "resolve")),
    Fault("a lease includes its end", "now < line[UNTIL]", "now <= line[UNTIL]"),
    Fault("a claim is found by its token", " and line[NONCE] == nonce then return copy", " then return copy"),
    Fault("one nonce begins twice", "if line[NONCE] == nonce then return again(line) end", "", _BEGIN),
    Fault("a lost claim is answered again", "or (line[HOLDS] and not owns(line))", "", _BEGIN),
    Fault("who left begins", "if has(record.leavers, nonce) then return {'over'} end", "", _BEGIN),
    Fault("beside any leader", "id(holder) == ARGV[13]", "ARGV[13] ~= ''", _BEGIN),
    Fault("two beside the leader", "if not alive[2] and", "if", _BEGIN),
    Fault("who waited gets nothing", "(since and since <= record.at)", "false", _BEGIN),
    Fault("unknown for ever", " and line[TOKEN] > record.settled then", " then", _BEGIN),
    Fault("the dead keep their place", "    clear_dead()\n    return open(record.cause, true)", "    return open(record.cause, true)", _BEGIN),
    Fault("any payload will do", "  if other_payload() then return {'conflict', record.runs} end", "", _BEGIN),
    Fault("reuse is not counted", "    record.reused = record.reused + 1\n", "", _BEGIN),
    Fault("nothing is saved", "if found[2] ~= '' then spend(", "if false then spend(", _BEGIN),
    Fault("renewed past max_run", "math.min(now + lease, line[STARTED] + tonumber(ARGV[9]))", "now + lease", ("renew",)),
    Fault("a renewal shortens", "math.max(line[UNTIL], till)", "till", ("renew",)),
    Fault("everybody beats", "answer[1] == 'renewed' and id(line) == record.leader", "answer[1] == 'renewed'", ("renew",)),
    Fault("a result lives its ttl", "now + math.max(ttl, lease)", "now + ttl", ("complete",)),
    Fault("all completions are executed", "if line[CAUSE] == 'fallback' or", "if", ("complete",)),
    Fault("a failure leaves the cause", "    record.cause = NEXT[ARGV[8]]\n", "", ("release",)),
    Fault("a failure keeps its place", "    vacate(line)\n    record.cause", "    record.cause", ("release",)),
    Fault("a leaver is forgotten", "  record.leavers[#record.leavers + 1] = nonce\n", "", _WITHDRAW),
    Fault("who left has executed", "    unbook(line)\n", "", _WITHDRAW),
    Fault("the forgotten keep their payload", "record.digest = false, false, 'forced', false", "record.digest = false, false, 'forced', record.digest", ("forget",)),
    Fault("an order counts twice", "if record.ordered ~= ARGV[5] then", "if true then", ("forget",)),
    Fault("a fresh result is replaced", "local found = record.at and now < record.fresh and content()", "local found = false", ("resolve",)),
    Fault("late is ok", "if line[STATUS] == 'lost' and status ~= 'lost' then status = 'late' end"),
    Fault("an end before its start", "math.max(now - ago, line[STARTED])", "now - ago"),
    Fault("the last spending counts", "if exceeds(spending(one)[1], spending(other)[1]) then return one end"),
    Fault("numbers compared as texts", "if #one ~= #other then return #one > #other end"),
    Fault("amounts are no whole numbers", "sign .. number)", "tonumber(sign .. number))"),
    Fault("a start is booked now", "book(line[STARTED], line[LABEL], 'cause_'", "book(now, line[LABEL], 'cause_'"),
    Fault("an end is booked at its start", "book(now, line[LABEL], 'call_' .. outcome, 1)", "book(line[STARTED], line[LABEL], 'call_' .. outcome, 1)"),
    Fault("a third is doubled", "elseif earlier == 1 then", "elseif earlier == 2 then"),
    Fault("duplicates waste nothing", "if DUPLICATES[line[CAUSE]] then"  , "if false then"),
    Fault("a run time belongs below its bound", "RUN_TIMES[bucket + 1] < line[ENDED]", "RUN_TIMES[bucket + 1] <= line[ENDED]"),
    Fault("a record lives as its last command says", "record.kept_until = last", "record.kept_until = now + tonumber(ARGV[4])", tuple(name for name in COMMANDS)),
    Fault("a record does not end", "if r.kept_until > 0 and r.kept_until <= now then", "if false then"),
    Fault("a result does not end", "if r.at and r.gone <= now then drop_result(r) end"),
    Fault("the fallback's place is taken for good", "  elseif name == record.fallback then\n    record.fallback = false\n"),
    Fault("nobody leads after the leader", "record.leader, record.fallback = record.fallback, false", "record.leader = false"),
    Fault("a line more", "local LINES, LEAVERS, WORKERS = 64,", "local LINES, LEAVERS, WORKERS = 65,", crowded=True),
    Fault("a leaver more", "WORKERS = 64, 8,", "WORKERS = 64, 9,"),
    Fault("a worker less", "WORKERS = 64, 8, 64", "WORKERS = 64, 8, 63", crowded=True),
    Fault("open lines are dropped", "if spare > 0 and is_done(other) then", "if spare > 0 then", crowded=True),
    Fault("nobody is woken", "if #living() == 0 then return 'one' end"),
    Fault("all wake one", "if renewed then return 'all' end", "if renewed then return 'one' end"),
    Fault("a free place wakes nobody", "if before.fallback and not record.fallback then return 'all' end"),
    Fault("lines stay in the index", "if not there[name] then redis.call('ZREM', KEYS[5], task .. ' ' .. name) end"),
    Fault("what was open stays open", "elseif was_open or not record.made or not record.indexed then", "elseif false then"),
    Fault("the open one that ends last", "due = math.min(due or line[UNTIL]", "due = math.max(due or line[UNTIL]"),
    Fault("what is inside is what it costs", "spent[number <= 3 and 9 or 10]", "spent[9]"),
    Fault("a report without a price has one", " or (spent[11] or 0) > 0 then", " then"),
    Fault("duplicates waste no cached tokens", "'wasted_', 4, sign)", "'wasted_', 2, sign)"),
    Fault("no count is owed", "for _, entry in ipairs(booked) do add(entry) end", "", moving=True),
    Fault("no index is owed", "record.owed[1] or not record.indexed", "record.owed[1]", moving=True),
    Fault("no removal is owed", "if not there[id(line)] then add(", "if false then add(", moving=True),
    Fault("what is done looks reusable", " and value[3] ~= 'unstorable'", "", moving=True),
)  # fmt: skip
