"""The id of a Prefect server: random, made when it is first asked for, and kept in the server's database.

It is a Prefect Variable. Sandboxes carry it, so that whoever removes what is left of flow runs can tell a run that this
server has forgotten from a run of another server's. A server that was made from a copy of another's database has the
same id, and would take the other's runs for forgotten: delete the variable on one of the two.
"""

import uuid

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import VariableCreate
from prefect.exceptions import ObjectAlreadyExists, PrefectHTTPStatusError
from prefect.logging import get_logger

from ...tasks.server_errors import describe_server_error

VARIABLE_NAME = "rlm_batch_server"


async def get_server_id() -> str:
    """This server's id. Empty where the server lets nobody have variables: then expiry alone decides on sandboxes."""
    try:
        async with get_client() as client:
            variable = await client.read_variable_by_name(VARIABLE_NAME)
            if variable is None:
                action = VariableCreate(name=VARIABLE_NAME, value=uuid.uuid4().hex, tags=["rlm-batch"])
                try:
                    variable = await client.create_variable(action)
                except ObjectAlreadyExists:  # somebody else has made it meanwhile: names are unique there
                    variable = await client.read_variable_by_name(VARIABLE_NAME)
    except PrefectHTTPStatusError as error:
        get_logger("rlm_batch").warning(
            "the Prefect server refused the variable %s (%s): sandboxes of this run are left to their expiry if its "
            "process dies",
            *(VARIABLE_NAME, describe_server_error(error)),
        )
        return ""
    return variable.value if variable is not None and isinstance(variable.value, str) else ""
